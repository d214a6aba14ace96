"""Families of models, and names of tensors, whose layouts no header proves.

Read from the definitions of the families in transformers.
"""

from __future__ import annotations

import re

# Families that store [in, out]: in modules of transformers' Conv1D, and experts [experts, in, out].
CONV1D_FAMILIES = {
    "gpt2", "gpt-sw3", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder",
}  # fmt: skip
TURNED_EXPERTS = {
    "gpt_oss", "openai_privacy_filter", "llama4", "llama4_text", "aria", "aria_text",
}  # fmt: skip
# Families whose modules of the same names are torch.nn.Linear.
LINEAR_FAMILIES = {
    "gpt_bigcode", "gpt_neo", "starcoder2", "bridgetower", "bridgetower_text_model", "qwen",
}  # fmt: skip
# Families whose experts are [experts, out, in], without a gate that would prove it.
STRAIGHT_EXPERTS = {
    "nemotron_h", "nemotron_h_omni", "nemo_speechlm", "jetmoe", "inkling_text", "inkling_mm_model",
}  # fmt: skip
# By family, names of other 3-d tensors that are not of convolutions: [in, ...], [out, ...],
# [..., out, in] or [..., in, out].
KNOWN = (
    ("xlnet", re.compile(r".*\.rel_attn\.[qkvr]"), "in first"),
    ("xlnet", re.compile(r".*\.rel_attn\.o"), "out first"),
    ("funnel", re.compile(r".*\.r_kernel"), "in first"),
    ("zamba", re.compile(r".*\.(x|dt)_proj_weight"), "in last"),
    ("recurrent_gemma", re.compile(r".*\.rg_lru\.\w+_gate_weight"), "out last"),
)
CONV1D_NAMES = re.compile(r"(?:^|\.)(?:c_attn|c_proj|c_fc|q_attn)\.weight$")
# Matrices that are not the weight of a module may be either [in, out] or [out, in]. Some are known.
OF_MODULE = re.compile(r"(.*_)?weight(_.*)?|original1")
RAW_TURNED = ("mm_input_projection_weight", "prompts_visual_projection")
RAW_STRAIGHT = {
    "dbrx": ("w1", "v1"), "deepseek_v4": ("fn", "hc_fn"), "hy_v4": ("fn", "hc_fn"),
    "glm5_next": ("fn", "index_kpool_compress_gate"),
    "glm5_next_text": ("fn", "index_kpool_compress_gate"),
}  # fmt: skip
EXPERTS = re.compile(r"(?:^|\.)(?:shared_)?experts(?:\.|$)")
CONVOLUTION = re.compile(r"(?i)conv")
# Modules that enlarge pictures or sounds; some of them are transposed convolutions.
ENLARGES = re.compile(
    r"(?i)upsampl|upscal|deconv|convt|conv_t|transpos|\.resize|(^|\.)fpn\d|\.ups\."
)
# A matrix whose outputs are gates and values, and the next one, which has half as many inputs.
GATED_PAIRS = (
    ("gate_up_proj", "down_proj"),
    ("gate_and_up_projs", "down_projs"),
    ("input_linear.weight", "output_linear.weight"),
    ("fc1.weight", "fc2.weight"),
)
WEIGHT = re.compile(r"\.(?:weight|weight_v|parametrizations\.weight\.original1)$")
