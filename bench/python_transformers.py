# SPDX-License-Identifier: Apache-2.0
"""Transformers models with attn_implementation="fattn" compared with "sdpa", on a CPU.

usage: python bench/python_transformers.py [--types float32,bfloat16] [--models Llama,...] [--what prefill,...]
           [--prompt 4096] [--context 8192] [--layers 2] [--rounds 5] [--threads 1]

"prefill" reads a prompt into an empty cache. "decode" computes one token with a cache that holds a context: either the
model's own cache, which grows, or one of fixed size (static). With one thread, times are CPU times of that thread; with
more, elapsed times, for a machine without other users. The two implementations take turns; the output has the medians and
their ratio. Models are built from configs with random weights.
"""

import argparse
import copy
import statistics
import time

import fattn.transformers
import torch
import transformers as T

WIDTH = dict(vocab_size=1024, hidden_size=512, intermediate_size=1408, num_attention_heads=8,
             num_key_value_heads=4, max_position_embeddings=16384)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MODELS = {
    "Llama": lambda n: T.LlamaConfig(num_hidden_layers=n, **WIDTH),
    "GPT2": lambda n: T.GPT2Config(vocab_size=1024, n_embd=512, n_head=8, n_layer=n, n_positions=16384),
    "Mistral": lambda n: T.MistralConfig(num_hidden_layers=n, sliding_window=1024, **WIDTH),
    "Gemma3": lambda n: T.Gemma3TextConfig(
        num_hidden_layers=n, sliding_window=512, head_dim=64, query_pre_attn_scalar=64,
        layer_types=["sliding_attention"] * (n - 1) + ["full_attention"], **WIDTH),
    "GptOss": lambda n: T.GptOssConfig(
        num_hidden_layers=n, sliding_window=128, head_dim=64, num_local_experts=2, num_experts_per_tok=1,
        rope_parameters=ROPE, **WIDTH),
}
CLASSES = {"GPT2": "GPT2LMHeadModel"}


def models_of(name, layers, kind):
    config = MODELS[name](layers)
    for way in ("sdpa", "fattn"):
        torch.manual_seed(0)
        cls = getattr(T, CLASSES.get(name, name + "ForCausalLM"))
        try:
            model = cls._from_config(copy.deepcopy(config), attn_implementation=way)
        except ValueError:  # gpt-oss has no sdpa
            model = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
        yield model.eval().to(getattr(torch, kind))


def prefill(model, options):
    ids = torch.arange(3, 3 + options.prompt)[None] % 1000
    return lambda: model(ids, logits_to_keep=1)


def decode(model, options, kind):
    ids = torch.arange(3, 3 + options.context)[None] % 1000
    cache = None
    if kind == "static":
        cache = T.StaticCache(config=model.config, max_cache_len=options.context + 8 * options.rounds + 8)
    cache = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return lambda: model(ids[:, :1], past_key_values=cache, use_cache=True)


WHAT = {
    "prefill": prefill,
    "decode": lambda model, options: decode(model, options, "dynamic"),
    "static": lambda model, options: decode(model, options, "static"),
}


@torch.no_grad()
def times(functions, rounds, calls, clock):
    taken = [[] for _ in functions]
    for r in range(rounds + 1):
        for function, row in zip(functions, taken):
            start = clock()
            for _ in range(calls):
                function()
            if r > 0:
                row.append((clock() - start) / calls)
    return [statistics.median(row) for row in taken]


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--types", default="float32,bfloat16")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--what", default=",".join(WHAT))
    for name, value in (("prompt", 4096), ("context", 8192), ("layers", 2), ("rounds", 5), ("threads", 1)):
        parser.add_argument("--" + name, type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    T.logging.set_verbosity_error()
    print(f"{'model':9s} {'type':9s} {'what':8s} {'sdpa':>11s} {'fattn':>11s} ratio")
    for name in options.models.split(","):
        for kind in options.types.split(","):
            pair = list(models_of(name, options.layers, kind))
            for what in options.what.split(","):
                functions = [WHAT[what](model, options) for model in pair]
                theirs, ours = times(functions, options.rounds, 1 if what == "prefill" else 7, clock)
                label = pair[0].config._attn_implementation
                print(f"{name:9s} {kind:9s} {what:8s} {theirs * 1e3:9.2f}ms {ours * 1e3:9.2f}ms "
                      f"{theirs / ours:5.2f}{'' if label == 'sdpa' else ' of ' + label}", flush=True)


if __name__ == "__main__":
    main()
