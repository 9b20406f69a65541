# SPDX-License-Identifier: Apache-2.0
"""A Transformers model with fattn as its attention. The model is built from a config, so nothing is downloaded and
it is untrained; it generates the same tokens as with eager attention.

usage: python generate.py
"""

import copy

import fattn.transformers  # noqa: F401  registers "fattn"
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
                     num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=512,
                     bos_token_id=1, eos_token_id=2, pad_token_id=0)
prompt = torch.tensor([[17, 42, 7, 99, 5]])
tokens = {}
for implementation in ("eager", "fattn"):
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation=implementation)
    tokens[implementation] = model.eval().generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, do_sample=False)
    print(f"{implementation:6s} {tokens[implementation][0].tolist()}")
assert torch.equal(tokens["eager"], tokens["fattn"])
