# SPDX-License-Identifier: Apache-2.0
"""Attention in NumPy, in double precision, written from the formula of docs/MATH.md alone."""

import numpy as np


def attention(q, k, v, *, causal=False, window=None, scale=None, softcap=None, bias=None, mask=None,
              alibi_slopes=None, sink=None, keep=None, dropout_p=0.0, top_left=False, lengths_k=None,
              starts_k=None, chunk=None, slopes_of_bias=None):
    """(o, lse) of (batch, sequence, head, channel) arrays. keep: the dropout pattern, boolean."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    b, sq, hq, d = q.shape
    sk, hk = k.shape[1:3]
    k, v = (np.repeat(a, hq // hk, axis=2) for a in (k, v))
    x = np.einsum("bihc,bjhc->bhij", q, k) * (1 / np.sqrt(d) if scale is None else scale)
    if softcap is not None:
        x = softcap * np.tanh(x / softcap)
    if bias is not None:
        bias = np.asarray(bias, np.float64)
        x = x + (bias if slopes_of_bias is None else
                 bias * np.asarray(slopes_of_bias, np.float64)[..., None, None])
    used = np.full(b, sk) if lengths_k is None else np.asarray(lengths_k)
    i, j = np.arange(sq)[:, None], np.arange(sk)[None]
    at = i + (np.zeros(b, int) if top_left else used - sq)[:, None, None, None]
    if alibi_slopes is not None:
        slopes = np.broadcast_to(np.asarray(alibi_slopes, np.float64), (b, hq))
        x = x - slopes[:, :, None, None] * np.abs(at - j)
    left, right = (-1, -1) if window is None else window
    right = 0 if causal else right
    seen = np.broadcast_to(j < used[:, None, None, None], x.shape).copy()
    if left >= 0:
        seen &= j - at >= -left
    if right >= 0:
        seen &= j - at <= right
    if starts_k is not None:
        seen &= j >= np.asarray(starts_k)[:, None, None, None]
    if chunk is not None:
        seen &= at // chunk == j // chunk
    if mask is not None:
        seen &= np.asarray(mask).astype(bool)
    x = np.where(seen, x, -np.inf)
    m = x.max(-1, initial=-np.inf)
    s = None if sink is None else np.broadcast_to(np.asarray(sink, np.float64)[None, :, None], m.shape)
    m = m if s is None else np.maximum(m, s)
    safe = np.where(np.isfinite(m), m, 0)
    p = np.exp(x - safe[..., None])
    total = p.sum(-1) + (0 if s is None else np.exp(s - safe))
    with np.errstate(divide="ignore"):
        lse = safe + np.log(total)
    p = p / np.where(total == 0, 1, total)[..., None]
    if keep is not None:
        t = np.floor(dropout_p * 65536 + 0.5)
        p = p * keep * (65536 / (65536 - t))
    return np.einsum("bhij,bjhc->bihc", p, v), lse
