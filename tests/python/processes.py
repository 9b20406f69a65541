# SPDX-License-Identifier: Apache-2.0
"""Processes for tests of several ranks.

They are forked from a server, which has imported PyTorch but never worked with it: threads do not survive a fork, and
other tests may have made PyTorch start some here. Importing PyTorch anew in each process takes minutes on a busy machine.
"""

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["fattn.torch", "pytest", "torch.distributed.fsdp", "torch.distributed.tensor.debug",
                                "torch.nn.attention.bias"])
