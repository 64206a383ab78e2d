# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of many architectures of transformers, by the names of their config classes."""

from __future__ import annotations

_SAME = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
_LAYERS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, **_EXPERTS,
}  # fmt: skip

RIGHT = {
    "Llama": {}, "Qwen3": {}, "Phi3": {}, "Olmo2": {}, "Granite": {}, "GPTNeoX": {}, "Apertus": {},
    "HunYuanDenseV1": {}, "Ernie4_5": {}, "Arcee": {}, "Cohere": {}, "Olmo": {}, "Helium": {}, "Gemma": {},
    "Persimmon": {},
    "Qwen2": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "Mistral": {"sliding_window": 8}, "Starcoder2": {"sliding_window": 8, "residual_dropout": 0.0},
    "Gemma2": {**_LAYERS, "query_pre_attn_scalar": 8}, "Gemma3Text": {**_LAYERS, "query_pre_attn_scalar": 8},
    "Olmo3": _LAYERS, "Cohere2": _LAYERS, "Exaone4": _LAYERS, "Ministral": _LAYERS,
    "GptOss": {**_LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Glm4": {"partial_rotary_factor": 0.5}, "Glm": {"partial_rotary_factor": 0.5},
    "GPT2": _GPT, "GPTJ": {**_GPT, "rotary_dim": 4}, "CodeGen": {**_GPT, "rotary_dim": 4},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "BioGpt": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "Phi": {"num_key_value_heads": 4, "resid_pdrop": 0.0},
    "Mixtral": {"num_local_experts": 4}, "Qwen3Moe": {"num_experts": 4, **_EXPERTS},
    "DeepseekV2": {**_MLA, "topk_method": "greedy"}, "DeepseekV3": _MLA,
    "Llama4Text": {"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"],
                   "num_local_experts": 2, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0]},
    "SeedOss": {"residual_dropout": 0.0},
}  # fmt: skip
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_conv": 4,
    "mamba_chunk_size": 16, "mamba_expand": 2,
}  # fmt: skip
# With recurrent layers or short convolutions beside attention.
HYBRID = {
    "Qwen3Next": {**_LINEAR, "num_experts": 4, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3_5Text": _LINEAR, "OlmoHybrid": {**_LINEAR, "linear_num_key_heads": 4},
    "KimiLinear": {**_MLA, "linear_num_heads": 4, "linear_head_dim": 8, "layer_types": _LINEAR["layer_types"]},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "FalconH1": {**_MAMBA, "mamba_d_ssm": 64}, "Bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "NemotronH": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2,
                  "layers_block_type": ["mamba", "attention"]},
    "GraniteMoeHybrid": {**_MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0,
                         "shared_intermediate_size": 64},
}  # fmt: skip
HYBRID_SINCE = 5.24  # the release of transformers whose layers call functions that can be given plans
# Refused, with words of the sentence.
REFUSED = {
    "Jamba": ({}, "mix(es)? neighbouring|attention of its own"),
    "MiniMax": ({}, "mix neighbouring"),
    "RecurrentGemma": ({}, "mix(es)? neighbouring|attention of its own"),
    "Bloom": ({"n_layer": 2, "n_head": 4}, "attention of its own"), "XGLM": ({"d_model": 32}, "attention of its own"),
    "Mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, "attention of its own"),
    "Falcon": ({}, "attention of their own"),
    "GPTNeo": ({"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}, "attention of their own"),
    "StableLm": ({"num_key_value_heads": 4}, "ran without attention by a plan"),
    "Nemotron": ({}, "ran without attention by a plan"),
}  # fmt: skip
# The release of transformers from which on they take their attention from the interface, and hand plans on.
SINCE = {"GPTJ": 5.24, "CodeGen": 5.24, "GPT2": 5.0, "OPT": 5.0, "BioGpt": 5.0, "Persimmon": 5.0}
_WITHOUT_HEAD_DIM = ("Falcon", "Phi", "StableLm")


def make_config(name: str):
    import transformers

    known = {**RIGHT, **HYBRID}
    changes = known[name] if name in known else REFUSED[name][0]
    given = {**_SAME, **changes}
    if name in _WITHOUT_HEAD_DIM:
        del given["head_dim"]
    return getattr(transformers, f"{name}Config")(**given)
