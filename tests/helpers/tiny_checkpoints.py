"""Write and read small checkpoint folders of any dtype, valid or broken on purpose."""

import hashlib
import itertools
import json
from pathlib import Path

import torch

DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
    "I64": torch.int64, "U8": torch.uint8,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode(header, data=b"", padding=8):
    """The bytes of a file with a header, valid or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % padding)
    return len(raw).to_bytes(8, "little") + raw + data


def file_bytes(tensors, metadata=None, padding=8):
    """The bytes of a valid safetensors file."""
    header = {"__metadata__": metadata or {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return encode(header, data, padding)


def save(folder, *shards, config=None, padding=8):
    """Write a checkpoint folder: one file, or several with an index."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "tiny"}))
    (folder / "tokenizer.json").write_text('{"tokens": []}')
    if len(shards) == 1:
        (folder / "model.safetensors").write_bytes(file_bytes(shards[0], padding=padding))
        return folder
    weight_map = {}
    for which, tensors in enumerate(shards, 1):
        name = f"model-{which:05d}-of-{len(shards):05d}.safetensors"
        (folder / name).write_bytes(file_bytes(tensors, padding=padding))
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save_in_files(folder, tensors, *cuts, **options):
    """Write a checkpoint folder of several files; a new one begins at each of these places."""
    names = list(tensors)
    edges = itertools.pairwise([0, *cuts, len(names)])
    return save(folder, *({n: tensors[n] for n in names[a:b]} for a, b in edges), **options)


def load(folder, files="*.safetensors"):
    """Read all tensors of a folder, by name."""
    tensors = {}
    for path in sorted(Path(folder).glob(files)):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            flat = torch.frombuffer(bytearray(raw[start:stop]), dtype=torch.uint8)
            tensors[name] = flat.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def tree_digest(folder, leave_out=()):
    """Digest of the names and bytes of all files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and name not in leave_out:
            digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
