# SPDX-License-Identifier: Apache-2.0
"""Attention on NumPy arrays, and its gradients.

usage: python numpy_arrays.py
"""

import fattn
import numpy as np

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 300, 8, 64), np.float32) for _ in range(3))
o, lse = fattn.attention(q, k, v, causal=True, return_lse=True)
gradients = fattn.attention_backward(np.ones_like(o), q, k, v, o, lse, causal=True)

print(fattn.info())
print(f"o is {o.shape}; its first row is v's first: {np.array_equal(o[:, 0], v[:, 0])}")
print(f"dv sums to {gradients.dv.sum():.1f}, the number of outputs, {o.size}: each is a mean of values")
assert np.array_equal(o[:, 0], v[:, 0]) and abs(gradients.dv.sum() / o.size - 1) < 1e-3
