# SPDX-License-Identifier: Apache-2.0
"""fattn.transformers: models built from configs, against their eager attention."""

import copy
import functools

import pytest

torch = pytest.importorskip("torch")
T = pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")

import fattn  # noqa: E402
import fattn.transformers as ft  # noqa: E402

T.logging.set_verbosity_error()

SMALL = dict(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1,
             eos_token_id=2, pad_token_id=0)
GPT2 = dict(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=256, attn_pdrop=0.0, resid_pdrop=0.0,
            embd_pdrop=0.0, bos_token_id=1, eos_token_id=2)
DECODERS = {
    "Llama": lambda: T.LlamaConfig(**SMALL),
    "GPT2": lambda: T.GPT2Config(**GPT2),
    "Mistral": lambda: T.MistralConfig(**SMALL, sliding_window=16),
    "Gemma2": lambda: T.Gemma2Config(**SMALL, head_dim=16, sliding_window=16,
                                     query_pre_attn_scalar=16, attn_logit_softcapping=5.0),
    "Gemma3": lambda: T.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=16,
                                         query_pre_attn_scalar=16),
    "GptOss": lambda: T.GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
                                     sliding_window=16, rope_parameters={"rope_type": "default",
                                                                         "rope_theta": 1e4}),
    "Llama4": lambda: T.Llama4TextConfig(**SMALL | {"num_hidden_layers": 4}, head_dim=16, intermediate_size_mlp=96,
                                         num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=16),
    "Qwen3": lambda: T.Qwen3Config(**SMALL, head_dim=16),
}
MODELS = {"GPT2": "GPT2LMHeadModel"}


def pair(config, cls):
    """The same model twice: eager attention, and fattn's."""
    models = []
    for name in ("eager", "fattn"):
        torch.manual_seed(0)
        model = cls._from_config(copy.deepcopy(config), attn_implementation=name).eval()
        for parameter in model.parameters():  # attention that looks at something
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter.data, std=0.15)
            elif "sink" in "".join(n for n, p in model.named_parameters() if p is parameter):
                torch.nn.init.normal_(parameter.data)
        models.append(model)
    models[1].load_state_dict(models[0].state_dict())
    return models


@pytest.fixture
def calls(monkeypatch):
    """How often fattn's attention ran."""
    counted = []
    run = ft.attention

    def count(*args, **kwargs):
        counted.append(kwargs)
        return run(*args, **kwargs)

    monkeypatch.setattr(ft, "attention", count)
    return counted


def same(a, b, where=None):
    if where is not None:
        a, b = a[where], b[where]
    scale = b.abs().max().item()
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5 * max(scale, 1))


def gradients_agree(models, losses):
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(models[1].named_parameters(), models[0].parameters()):
        if b.grad is None:
            assert a.grad is None, name
        else:
            same(a.grad, b.grad)


@pytest.mark.parametrize("name", DECODERS)
def test_decoder(name, calls):
    """Logits and gradients of a left-padded batch; greedy generation with both kinds of caches."""
    eager, ours = models = pair(DECODERS[name](), getattr(T, MODELS.get(name, name + "ForCausalLM")))
    ids, mask = torch.randint(3, 96, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[0, :7] = 0
    labels = ids.clone()
    labels[0, :8] = -100  # nothing is predicted from padding, whose rows see no key
    results = [model(ids, attention_mask=mask, labels=labels) for model in models]
    layers = models[0].config.num_hidden_layers
    assert len(calls) == layers
    same(results[1].logits, results[0].logits, mask.bool())
    gradients_agree(models, [r.loss for r in results])
    for cache in (None, "static"):
        options = dict(attention_mask=mask, max_new_tokens=64, do_sample=False, pad_token_id=0,
                       eos_token_id=None, cache_implementation=cache, disable_compile=True)
        assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))
    assert len(calls) > 2 * layers * 60
    # Without padding causality, windows and chunks are the library's, and nothing is masked.
    calls.clear()
    same(ours(ids).logits, eager(ids).logits)
    assert all(c["causal"] and c["mask"] is None for c in calls)
    assert any(c["window"] for c in calls) == (name in ("Mistral", "Gemma2", "Gemma3", "GptOss"))
    assert [c["chunk"] for c in calls] == ([16, 16, 16, None] if name == "Llama4" else [None] * layers)


def agree(config, cls, calls, inputs=None, padded=7, static=True):
    """Logits, gradients and greedy generation of a batch with padding on the left, against eager attention."""
    eager, ours = models = pair(config, cls)
    ids, mask = torch.randint(3, 96, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[0, :padded] = 0
    inputs = dict(input_ids=ids, attention_mask=mask)
    logits = [model(**inputs).logits for model in models]
    assert calls
    same(logits[1], logits[0], mask.bool())
    gradients_agree(models, [x[mask.bool()].square().mean() for x in logits])
    for cache in (None, "static")[:1 + static]:
        options = dict(inputs, max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None,
                       cache_implementation=cache, disable_compile=True)
        assert torch.equal(ours.generate(**options), eager.generate(**options))
    return models


HYBRIDS = {  # layers without keys, or with the keys of other layers, beside layers of attention
    "Jamba": lambda: T.JambaConfig(**SMALL, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=8,
                                   mamba_dt_rank=8, use_mamba_kernels=False),
    "Qwen3Next": lambda: T.Qwen3NextConfig(**SMALL, head_dim=16, layer_types=["linear_attention", "full_attention"],
                                           linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
                                           linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                                           shared_expert_intermediate_size=32),
    "Gemma4": lambda: T.Gemma4TextConfig(**SMALL | {"num_hidden_layers": 4}, head_dim=16, global_head_dim=16,
                                         layer_types=["sliding_attention", "full_attention"] * 2,
                                         num_kv_shared_layers=2, hidden_size_per_layer_input=8,
                                         vocab_size_per_layer_input=96, sliding_window=64)}


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_decoder(name, calls):
    agree(HYBRIDS[name](), getattr(T, name + "ForCausalLM"), calls)


def test_layers_that_drop_queries(calls):
    """Layers that share the keys of others compute the last rows alone, also where their mask is None."""
    eager, ours = pair(HYBRIDS["Gemma4"](), T.Gemma4ForCausalLM)
    ids = torch.randint(3, 96, (2, 20))
    with torch.no_grad():
        for kept in (1, 3):
            same(ours(ids, logits_to_keep=kept, use_cache=False).logits,
                 eager(ids, logits_to_keep=kept, use_cache=False).logits)
            assert calls[-1]["bias"] is calls[-1]["mask"] is None
            same(*[model(ids, past_key_values=T.StaticCache(config=model.config, max_cache_len=40),
                         logits_to_keep=kept).logits for model in (ours, eager)])


MLA = SMALL | dict(num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16,
                   v_head_dim=16, head_dim=8)
EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
INDEXERS = {  # of keys, and of blocks of keys
    "DeepseekV32": lambda: T.DeepseekV32Config(**MLA, **EXPERTS, index_n_heads=2, index_head_dim=16, index_topk=6,
                                               n_group=1, topk_group=1, first_k_dense_replace=1),
    "MiniMaxM3VL": lambda: T.MiniMaxM3VLTextConfig(
        **SMALL, head_dim=16, rotary_dim=8, num_local_experts=4, num_experts_per_tok=2, dense_intermediate_size=96,
        shared_intermediate_size=32, index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=2,
        layer_types=["full_attention", "minimax_m3_sparse"])}


@pytest.mark.parametrize("name", INDEXERS)
def test_indexer(name, calls):
    """A query attends to those keys only that the model's indexer has selected."""
    # MiniMax's indexer also looks at padding, whose rows are the mean of all values in eager attention, and 0 here.
    agree(INDEXERS[name](), getattr(T, name + "ForCausalLM"), calls, padded=7 * (name == "DeepseekV32"))
    rows = [c["mask"].sum(-1).max() for c in calls if c["mask"] is not None and c["mask"].shape[2] == 24]
    assert rows and min(rows) < 10


@pytest.mark.parametrize("name", ["s_aux", "sinks"])
def test_sinks(name, calls):
    """One for each head, or one for each row, which the library does not have."""
    q, k, v = (torch.randn(2, n, 5, 8, requires_grad=True) for n in (4, 2, 2))
    sink = torch.randn((4,) if name == "s_aux" else (2, 4, 5, 1), requires_grad=True)
    mask = torch.rand(2, 1, 5, 5) > 0.3
    mask[1, 0, 2] = False
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~mask, -torch.inf)
    column = sink.reshape(-1, 4, sink.shape[-2] if sink.dim() > 1 else 1, 1).expand(2, 4, 5, 1)
    wanted = (torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)).transpose(1, 2)
    ours = ft.attention_forward(None, q, k, v, mask, scaling=0.3, **{name: sink})[0]
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
    g = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v, sink), g) for o in (ours, wanted))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_double_precision(monkeypatch):
    """Sinks have the precision of queries, where the library has it."""
    monkeypatch.setattr(ft, "attention", functools.partial(ft.attention, device="reference"))
    q, sink = torch.randn(1, 2, 5, 8, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    shares = torch.cat([q @ q.mT * 0.3, sink[None, :, None, None].expand(1, 2, 5, 1)], -1).softmax(-1)
    ours = ft.attention_forward(None, q, q, q, None, scaling=0.3, is_causal=False, s_aux=sink)[0]
    torch.testing.assert_close(ours, (shares[..., :-1] @ q).transpose(1, 2))


def test_channels_apart():
    """Tensors whose last axis is not contiguous, as a transposed convolution's result, are copied."""
    q, k, v = (torch.randn(2, 2, 8, 5).mT for _ in range(3))
    for t in ((q, k, v), tuple(t.detach().requires_grad_() for t in (q, k, v))):
        ours = ft.attention_forward(None, *t, None, is_causal=False)[0]
        torch.testing.assert_close(ours, torch.nn.functional.scaled_dot_product_attention(*t).transpose(1, 2),
                                   rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_growing_cache(name):
    """The same tokens as DynamicCache's, greedy, by beams, and after tokens were taken back; what is held does not
    move but where its room ends."""
    eager, ours = pair(DECODERS[name](), getattr(T, name + "ForCausalLM"))
    ids = torch.randint(3, 96, (2, 20))
    for beams in (1, 3):
        options = dict(max_new_tokens=24, do_sample=False, num_beams=beams, pad_token_id=0, eos_token_id=None)
        wanted = eager.generate(ids, **options)
        assert torch.equal(ours.generate(ids, past_key_values=ft.GrowingCache(config=ours.config), **options), wanted)
        assert torch.equal(ours.generate(ids, **options), wanted)
    with torch.no_grad():
        for kind in (ft.GrowingCache, T.DynamicCache):
            cache, moves, at = kind(), 0, None
            logits = []
            for step in range(90):
                logits.append(ours(ids[:, :20 if step == 0 else 1], past_key_values=cache).logits[:, -1])
                moves += cache.layers[-1].keys.data_ptr() != at
                at = cache.layers[-1].keys.data_ptr()
                if step == 40:
                    cache.crop(-3)
            if kind is ft.GrowingCache:
                assert moves == 2 and all(type(layer) is ft._GrowingLayer for layer in cache.layers)
                grown = logits
            else:
                for a, b in zip(grown, logits):
                    same(a, b)
    # Gradients need every version of the keys, and get it.
    cache = ft.GrowingCache()
    ours(ids, past_key_values=cache)
    ours(ids[:, :1], past_key_values=cache).logits.sum().backward()
    other = T.DynamicCache()
    wanted = {n: p.grad.clone() for n, p in ours.named_parameters() if p.grad is not None}
    ours.zero_grad()
    ours(ids, past_key_values=other)
    ours(ids[:, :1], past_key_values=other).logits.sum().backward()
    for n, p in ours.named_parameters():
        if p.grad is not None:
            same(p.grad, wanted[n])


def test_caches_of_models_grow_in_place():
    """Those that a model or generate() makes for fattn's attention, and no others."""
    eager, ours = pair(DECODERS["Llama"](), T.LlamaForCausalLM)
    ids = torch.randint(3, 96, (1, 20))

    def grows(cache):
        return {isinstance(layer, ft._Rooms) for layer in cache.layers}

    with torch.no_grad():
        assert grows(ours(ids).past_key_values) == {True} and grows(eager(ids).past_key_values) == {False}
        assert grows(ours.generate(ids, max_new_tokens=2, return_dict_in_generate=True).past_key_values) == {True}
    assert True not in grows(T.DynamicCache()) | grows(T.DynamicCache(config=eager.config))


def test_growing_cache_keeps_what_it_gave():
    """No later token is written where someone may look, nor where inference mode forbids it."""
    def states(n):
        return torch.randn(2, 3, n, 8), torch.randn(2, 3, n, 8)

    cache = ft.GrowingCache()
    with torch.inference_mode():
        cache.update(*states(10), 0)
    with torch.no_grad():
        held = cache.update(*states(5), 0)
        copies = [t.clone() for t in held]
        twin = copy.copy(cache.layers[0])
        cache.crop(-4)
        shorter = cache.update(*states(4), 0)
        twin.update(*states(2))
        again = cache.update(*states(1), 0)
        for t, was, less, now in zip(held, copies, shorter, again):
            assert torch.equal(t, was) and torch.equal(less[:, :, :11], was[:, :, :11])
            assert torch.equal(now[:, :, :15], less) and not torch.equal(less, was)
    # A window keeps what it must, and its memory does not grow.
    ours, theirs = ft._GrowingWindowLayer(16), cache_utils.DynamicSlidingWindowLayer(16)
    given, largest = [], 0
    with torch.no_grad():
        for n in [40] + [1] * 200 + [3, 30] + [1] * 20:
            new = states(n)
            made, wanted = ours.update(*new), theirs.update(*new)
            given.append((made[0], made[0].clone()))
            assert all(torch.equal(a, b) for a, b in zip(made, wanted))
            assert torch.equal(ours.keys, theirs.keys) and ours.get_mask_sizes(1) == theirs.get_mask_sizes(1)
            largest = max(largest, ours._rooms[0][0].shape[2])
        assert all(torch.equal(a, b) for a, b in given) and largest <= 40 + 64
    # A query that learns beside keys that do not: its gradient needs the keys as they were.
    q = torch.randn(2, 3, 1, 8, requires_grad=True)
    score = (q @ cache.update(*states(1), 0)[0].mT).sum()
    cache.update(*states(1), 0)
    score.backward()


def test_encoder(calls):
    config = T.BertConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                          intermediate_size=96, max_position_embeddings=64)
    models = pair(config, T.BertModel)
    ids, mask = torch.randint(3, 96, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    outputs = [model(ids, attention_mask=mask).last_hidden_state for model in models]
    assert len(calls) == 2
    same(outputs[1], outputs[0], mask.bool())
    gradients_agree(models, [o[mask.bool()].square().mean() for o in outputs])


def test_relative_positions(calls):
    config = T.T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
                        decoder_start_token_id=0, dropout_rate=0.0)
    models = pair(config, T.T5ForConditionalGeneration)
    ids, mask = torch.randint(3, 96, (2, 20)), torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    labels = torch.randint(3, 96, (2, 9))
    results = [model(ids, attention_mask=mask, labels=labels) for model in models]
    assert len(calls) == 6  # in each of two layers: of the encoder, of the decoder, across
    same(results[1].logits, results[0].logits)
    gradients_agree(models, [r.loss for r in results])
    options = dict(attention_mask=mask, max_new_tokens=64, do_sample=False, eos_token_id=None,
                   disable_compile=True)
    for cache in (None, "static"):
        options["cache_implementation"] = cache
        assert torch.equal(models[1].generate(ids, **options), models[0].generate(ids, **options))


def test_vision(calls):
    config = T.ViTConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
                         image_size=32, patch_size=8)
    models = pair(config, T.ViTModel)
    pixels = torch.randn(2, 3, 32, 32)
    outputs = [model(pixels).last_hidden_state for model in models]
    assert len(calls) == 2
    same(outputs[1], outputs[0])
    gradients_agree(models, [o.square().mean() for o in outputs])


def test_speech(calls):
    config = T.WhisperConfig(vocab_size=96, d_model=64, encoder_layers=2, decoder_layers=2,
                             encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96,
                             decoder_ffn_dim=96, num_mel_bins=16, max_source_positions=30,
                             max_target_positions=80, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                             decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None)
    models = pair(config, T.WhisperForConditionalGeneration)
    sound, labels = torch.randn(2, 16, 60), torch.randint(3, 96, (2, 9))
    results = [model(sound, labels=labels) for model in models]
    assert len(calls) == 6
    same(results[1].logits, results[0].logits)
    gradients_agree(models, [r.loss for r in results])
    options = dict(max_new_tokens=64, do_sample=False, eos_token_id=None)
    ours, wanted = (model.generate(sound, **options) for model in reversed(models))
    assert ours.shape[1] >= 64 and torch.equal(ours, wanted)


PATTERNS = {  # queries, keys, positions of the first of each, window
    "prefill": (40, 40, 0, 0, None), "window": (40, 40, 0, 0, 16), "decode": (1, 60, 41, 0, None),
    "window that slides": (1, 20, 50, 35, 12), "chunk": (5, 64, 30, 0, 16),
    "static": (5, 64, torch.tensor(30), 0, None)}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_masks_say_what_they_are_made_of(name, padded, calls):
    """The library skips what causality and windows hide, and gives what the whole mask gives."""
    from transformers import masking_utils as masks
    queries, keys, q_offset, kv_offset, window = PATTERNS[name]
    function = (masks.causal_mask_function if window is None else
                masks.sliding_window_causal_mask_function(window))
    seen = torch.ones(2, int(q_offset) + queries, dtype=torch.bool)
    seen[0, :7] = not padded
    arguments = (2, queries, keys, q_offset, kv_offset, function, seen)
    mask = ft.attention_mask(*arguments, allow_is_causal_skip=False)
    assert torch.equal(mask, masks.sdpa_mask(*arguments, allow_is_causal_skip=False))
    q, k, v = torch.randn(2, 4, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 8)
    ours = ft.attention_forward(None, q, k, v, mask, is_causal=True)[0]
    assert calls[0]["causal"] and calls[0]["window"] == (None if window is None else (window - 1, 0))
    plain = ft.attention_forward(None, q, k, v, mask.clone(), is_causal=True)[0]
    assert not calls[1]["causal"] and calls[1]["mask"].shape[2:] == (queries, keys)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
    mask[..., :] = True  # no longer what it was made of
    ours = ft.attention_forward(None, q, k, v, mask, is_causal=True)[0]
    assert not calls[2]["causal"] and not torch.equal(ours, plain)


CHUNKS = {  # queries, keys, positions of the first of each, left padding
    "prefill": (40, 40, 0, 0, (0, 0)), "decode": (1, 60, 41, 0, (0, 0)), "cache that slides": (3, 20, 50, 33, (0, 0)),
    "padded": (40, 40, 0, 0, (7, 7)), "padded decode": (1, 60, 41, 0, (19, 19)), "padded unlike": (40, 40, 0, 0, (7, 3))}


@pytest.mark.parametrize("name", CHUNKS)
def test_masks_of_chunks_say_so(name, calls):
    from transformers import masking_utils as masks
    queries, keys, q_offset, kv_offset, left = CHUNKS[name]
    function = masks.chunked_causal_mask_function(16, torch.tensor(left))
    seen = (torch.arange(q_offset + queries) >= torch.tensor(left)[:, None])
    mask = ft.attention_mask(2, queries, keys, q_offset, kv_offset, function, seen, allow_is_causal_skip=False)
    q, k, v = torch.randn(2, 4, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 8)
    ours = ft.attention_forward(None, q, k, v, mask, is_causal=True)[0]
    if name == "padded unlike":  # each sequence has chunks of its own
        assert calls[0]["window"] == (15, 0) and calls[0]["chunk"] is None and calls[0]["mask"] is mask
    else:
        assert calls[0]["chunk"] == 16 and (calls[0]["mask"] is None or calls[0]["mask"].shape[2] == 1)
    plain = ft.attention_forward(None, q, k, v, mask.clone(), is_causal=True)[0]
    assert not calls[1]["causal"] and calls[1]["chunk"] is None
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_other_masks_are_read_as_they_are(calls):
    from transformers import masking_utils as masks
    for function in (masks.sliding_window_bidirectional_mask_function(4), masks.bidirectional_mask_function,
                     masks.or_masks(masks.causal_mask_function,
                                    masks.chunked_causal_mask_function(8, torch.zeros(2, dtype=torch.int64))),
                     lambda b, h, q, k: k <= q):
        mask = ft.attention_mask(2, 40, 40, mask_function=function, allow_is_causal_skip=False)
        ft.attention_forward(None, *(torch.randn(2, 2, 40, 8) for _ in range(3)), mask, is_causal=True)
        assert not calls[-1]["causal"] and calls[-1]["mask"] is mask


def test_training_with_dropout(calls):
    """A step of training draws dropout and has gradients."""
    config = T.GPT2Config(**GPT2 | {"attn_pdrop": 0.3})
    torch.manual_seed(0)
    model = T.GPT2LMHeadModel._from_config(config, attn_implementation="fattn").train()
    ids = torch.randint(3, 96, (2, 20))
    losses = [model(ids, labels=ids).loss for _ in range(2)]
    assert losses[0] != losses[1] and calls[0]["dropout_p"] == 0.3
    losses[0].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_compiled():
    model = pair(DECODERS["Llama"](), T.LlamaForCausalLM)[1]
    ids = torch.randint(3, 96, (2, 20))
    with torch.no_grad():
        same(torch.compile(model, backend="aot_eager", fullgraph=True)(ids).logits, model(ids).logits)


def test_exports_any_length():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = pair(DECODERS["Llama"](), T.LlamaForCausalLM)[1]

        def forward(self, ids):
            return self.decoder(input_ids=ids, use_cache=False).logits

    model = Model()
    n = torch.export.Dim("n", min=2, max=200)
    exported = torch.export.export(model, (torch.randint(3, 96, (1, 7)),), dynamic_shapes={"ids": {1: n}})
    assert any("fattn.forward" in str(node.target) for node in exported.graph.nodes)
    ids = torch.randint(3, 96, (1, 19))
    same(exported.module()(ids), model(ids))


def test_probabilities_are_refused():
    model = pair(DECODERS["Llama"](), T.LlamaForCausalLM)[1]
    with pytest.raises(fattn.Unsupported, match="output_attentions"):
        ft.attention_forward(model, *(torch.randn(1, 2, 3, 8) for _ in range(3)), None,
                             output_attentions=True)


EAGER = {  # models for which Transformers declares no support but that of eager attention, or that need its masks
    "BigBirdPegasus": lambda: T.BigBirdPegasusConfig(
        vocab_size=96, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64,
        attention_type="original_full"),
    "DeepseekV4": lambda: T.DeepseekV4Config(
        **SMALL | {"num_key_value_heads": 1, "num_hidden_layers": 2}, **EXPERTS, head_dim=16, q_lora_rank=24,
        partial_rotary_factor=0.5, sliding_window=8, o_groups=2, o_lora_rank=16, index_n_heads=2, index_head_dim=16,
        index_topk=2, mlp_layer_types=["moe", "moe"],
        layer_types=["compressed_sparse_attention", "sliding_attention"])}


@pytest.mark.parametrize("name", EAGER)
def test_models_with_eager_masks(name, calls):
    """Attention of their own, and tensors that they join to a mask, are right beside fattn's."""
    eager, ours = pair(EAGER[name](), getattr(T, name + "Model"))
    assert ours.config._attn_implementation == "fattn_with_eager_masks"
    ids, mask = torch.randint(3, 96, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[1, 17:] = 0
    a, b = (model(ids, attention_mask=mask).last_hidden_state for model in (ours, eager))
    assert calls
    same(a, b, mask.bool() if name == "DeepseekV4" else None)


def test_no_mask_means_all_keys_for_eager_models():
    """BridgeTower's layers say that they are causal, and are not."""
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    module = torch.nn.Module()
    module.is_causal = True
    run = T.AttentionInterface()["fattn_with_eager_masks"]
    torch.testing.assert_close(run(module, q, k, v, None)[0], ft.attention_forward(module, q, k, v, None,
                                                                                   is_causal=False)[0])


def test_attention_of_a_models_own():
    """It would add the boolean masks of "fattn" to the scores."""
    config = T.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(fattn.Unsupported, match="BloomForCausalLM has an attention of its own"):
        T.AutoModelForCausalLM.from_config(config, attn_implementation="fattn")
    vision = T.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                         image_size=8, patch_size=4)
    text = T.TrOCRConfig(vocab_size=32, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16)
    config = T.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    made = T.AutoModelForImageTextToText.from_config(
        config, attn_implementation={"encoder": "fattn", "decoder": "eager"})
    assert (made.encoder.config._attn_implementation, made.decoder.config._attn_implementation) == ("fattn", "eager")
    vision = T.BlipVisionConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                                image_size=8, patch_size=4)
    text = T.BlipTextConfig(vocab_size=32, hidden_size=16, encoder_hidden_size=16, num_hidden_layers=1,
                            num_attention_heads=2, intermediate_size=16)
    config = T.BlipConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    with pytest.raises(fattn.Unsupported, match=r'BlipTextModel has .*\{"text_config": "eager"\}, with "fattn" for'):
        T.BlipModel._from_config(copy.deepcopy(config), attn_implementation="fattn")
    made = T.BlipModel._from_config(config, attn_implementation={"text_config": "eager", "vision_config": "fattn"})
    assert made.vision_model.config._attn_implementation in ft._NAMES
