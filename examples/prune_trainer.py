"""Prune in Hugging Face's Trainer: one callback; a run that was stopped goes on where it was.

python examples/prune_trainer.py                   one process
launch/torchrun.sh examples/prune_trainer.py       2 processes, DDP
"""

import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import distprune as prune
from distprune import schedule
from distprune.integrations.transformers import PruningCallback

OUTPUT = sys.argv[1] if len(sys.argv) > 1 else "runs/prune_trainer"


def main() -> None:
    torch.manual_seed(0)
    # Bytes of Python's own sources, in windows of 64.
    windows = torch.tensor(list(Path(os.__file__).read_bytes())).unfold(0, 64, 16)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=None,
        eos_token_id=None,
    )
    callback = PruningCallback(schedule.Cubic(begin=10, end=40, frequency=10, final_sparsity=0.7))
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            OUTPUT,
            max_steps=60,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=20,
            save_steps=30,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=[{"input_ids": each, "labels": each} for each in windows],
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=any(Path(OUTPUT).glob("checkpoint-*")))
    trainer.save_model(f"{OUTPUT}/pruned")
    if trainer.is_world_process_zero():
        print(callback.last_report)
        # Anybody can load it, without distprune.
        model = LlamaForCausalLM.from_pretrained(f"{OUTPUT}/pruned")
        weights = [getattr(*pair) for pair in prune.select(model, include="*_proj")]
        zeros = sum(int((weight == 0).sum()) for weight in weights)
        print(f"{zeros:,} of {sum(w.numel() for w in weights):,} weights are zero in the file")


if __name__ == "__main__":
    main()
