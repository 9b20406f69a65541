# SPDX-License-Identifier: Apache-2.0
"""jax.nn.dot_product_attention compared with fattn.jax's: on a GPU if JAX has one, otherwise on a CPU.

usage: python bench/python_jax.py [--lengths 4096] [--heads 4] [--dims 64,128] [--types float32,bfloat16]
           [--rounds 5] [--calls 20] [--wall]

Both are compiled programs and take turns; the output has the medians and their ratio. The first call of a turn does not
count, because threads of the other may still be spinning. On a CPU the time is the process's CPU time, so that other
programs do not count, or with --wall the elapsed time. On a GPU it is the time until the result is there, with JAX's
cuDNN implementation; --calls calls are queued at a time.
"""

import argparse
import functools
import statistics
import time

import fattn.jax
import jax

ON_GPU = jax.default_backend() == "gpu"


def times(functions, arrays, rounds, calls, clock):
    taken = [[] for _ in functions]
    for r in range(rounds + 1):
        for function, row in zip(functions, taken):
            jax.block_until_ready(function(*arrays))
            start = clock()
            for _ in range(calls):
                result = function(*arrays)
            jax.block_until_ready(result)
            if r > 0:
                row.append((clock() - start) / calls)
    return [statistics.median(row) for row in taken]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="4096")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--types", default="bfloat16" if ON_GPU else "float32,bfloat16")
    parser.add_argument("--heads", type=int, default=16 if ON_GPU else 4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=20 if ON_GPU else 1)
    parser.add_argument("--wall", action="store_true", default=ON_GPU)
    options = parser.parse_args()
    clock = time.perf_counter if options.wall else time.process_time
    theirs = functools.partial(jax.nn.dot_product_attention, implementation="cudnn" if ON_GPU else None)
    print(f"{'type':9s} {'d':>4s} {'N':>6s} {'causal':6s} {'what':9s} {'jax.nn':>10s} {'fattn':>10s} ratio")
    for kind in options.types.split(","):
        for d in map(int, options.dims.split(",")):
            for n in map(int, options.lengths.split(",")):
                arrays = [jax.random.normal(jax.random.key(i), (1, n, options.heads, d), kind)
                          for i in range(3)]
                for causal in (False, True):
                    ways = [functools.partial(f, is_causal=causal)
                            for f in (theirs, fattn.jax.dot_product_attention)]
                    gradients = [jax.grad(lambda q, k, v, f=f: (f(q, k, v) * q).astype("float32").sum(),
                                          argnums=(0, 1, 2)) for f in ways]
                    for what, functions in (("forward", ways), ("gradient", gradients)):
                        a, b = times([jax.jit(f) for f in functions], arrays, options.rounds,
                                     options.calls, clock)
                        print(f"{kind:9s} {d:4d} {n:6d} {causal!s:6s} {what:9s} {a * 1e3:8.2f}ms "
                              f"{b * 1e3:8.2f}ms {a / b:5.2f}", flush=True)


if __name__ == "__main__":
    main()
