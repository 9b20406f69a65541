# SPDX-License-Identifier: Apache-2.0
"""Attention in a compiled JAX program, with its gradient.

usage: python jax_arrays.py
"""

import fattn.jax
import jax
import jax.numpy as jnp

q, k, v = (jax.random.normal(jax.random.key(i), (2, 300, 8, 64)) for i in range(3))


@jax.jit
def loss(q, k, v):
    return jnp.square(fattn.jax.dot_product_attention(q, k, v, is_causal=True)).mean()


value, gradient = jax.value_and_grad(loss)(q, k, v)
wanted = jnp.square(jax.nn.dot_product_attention(q, k, v, is_causal=True)).mean()
print(f"loss {value:.6f}, by jax.nn {wanted:.6f}; the gradient's norm is {jnp.linalg.norm(gradient):.6f}")
assert abs(value - wanted) < 1e-6
