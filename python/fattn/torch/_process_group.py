# SPDX-License-Identifier: Apache-2.0
"""A process group of torch.distributed as a transport of fattn/distributed.h.

The backend moves the bytes. Gloo sends and receives in threads of its own while kernels run. A timeout of gloo closes
its connections, by which the others learn that a rank has given up. Other backends are polled until they are done. Over
NCCL kernels wait for messages, too. So the host waits for a group of messages only when the next one is to be waited for,
and queues work meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fattn import _c, _groups
from fattn._errors import RankLost, RankTimeout, Unsupported

# Tags of other users of the group are small numbers.
_TAG, _TAG_REASON, _TAG_NEVER = 7700, 7716, 7717
_REASON = 256
_SOON = 1e-3  # seconds of polling without naps, since a nap outlasts a short message
_NAP = 20e-6
_FOR_EVER = 1e9  # seconds


class _DeviceBytes:
    """Memory of a GPU, for torch.as_tensor()."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1",
                                         "strides": None, "version": 3}


class ProcessGroup:
    """Ranks of a process group that share tensors on one kind of device."""

    # NCCL between two H200: seconds that a group of messages costs, most of them in Python, and bytes a second. With
    # other backends the library's defaults stand.
    LATENCY, BANDWIDTH = 2e-4, 2.5e11

    def __init__(self, group: Any, device: torch.device, stream: int | None) -> None:
        self.group, self.device = group, device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise Unsupported("this process is not a member of the process group")
        backend = _backend_for(group, device)
        self.is_gloo = backend == "gloo"
        self.latency, self.bandwidth = (self.LATENCY, self.BANDWIDTH) if backend == "nccl" else (0.0, 0.0)
        # With this variable NCCL's wait() is one of the host.
        self.can_run_ahead = backend == "nccl" and os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") == "0"
        self.broken = False
        self.error: BaseException | None = None  # of a callback, to be raised again
        self.works: list[tuple[Any, str]] = []
        self.before: list[tuple[Any, str]] = []  # which the host has not waited for
        self.runs_ahead = False
        self.reasons: dict[int, tuple[Any, torch.Tensor]] = {}
        for peer in range(self.ranks):
            if peer != self.rank and self.is_gloo:
                self.reasons[peer] = self._receive_reason(peer)
        # Callbacks hold no reference to self: in a cycle the group's sockets and threads would last until
        # Python looks for cycles.
        own = weakref.proxy(self)
        # ctypes keeps no reference to callbacks.
        self.callbacks = (_groups.START(lambda *message: own._start(*message)),
                          _groups.WAIT(lambda *message: own._wait(*message)),
                          _groups.ABORT(lambda *message: own._abort(*message)))
        start, wait, abort = self.callbacks
        self.table = _groups.Transport(
            struct_size=ctypes.sizeof(_groups.Transport), rank=self.rank, ranks=self.ranks, start=start,
            wait=wait, abort=abort, device_memory=device.type != "cpu", stream=stream)

    # --- Functions of the transport ---------------------------------------------------------------

    def _start(self, user: int, messages: Any, count: int) -> int:
        try:
            self._must_be_whole()
            # Receives first: gloo passes data one way at a time where both sides send before they receive.
            posted = [(m, f"rank {m.peer}", self._bytes(m.data, m.bytes))
                      for m in sorted(messages[:count], key=lambda m: -m.receive)]
            if self.is_gloo:
                self.works = [(self._begin(m, whom, data), whom) for m, whom, data in posted]
                return 0
            operations = [dist.P2POp(dist.irecv if m.receive else dist.isend, data, group=self.group,
                                     group_peer=m.peer, tag=_TAG + m.tag) for m, _, data in posted]
            with self.lost(posted[0][1]):
                works = dist.batch_isend_irecv(operations)
            # A backend may return one work for all of them.
            self.works = [(work, whom) for work, (_, whom, _) in zip(works, posted)]
            return 0
        except BaseException as error:
            return self._failed(error)

    def _wait(self, user: int, messages: Any, count: int, seconds: float) -> int:
        try:
            self._must_be_whole()  # after _abort() it is not
            self.catch_up(seconds)
            self.before, self.works = self.works, []
            if self.runs_ahead and self.can_run_ahead:
                for work, _ in self.before:
                    work.wait()
            else:
                self.catch_up(seconds)
            return 0
        except BaseException as error:
            return self._failed(error)

    def _must_be_whole(self) -> None:
        if self.broken:
            raise RankLost("this process group has failed before")

    def _abort(self, user: int, reason: bytes | None) -> None:
        try:
            self.give_up(reason or b"no reason given")
        except BaseException as error:
            self.error = self.error or error

    def _failed(self, error: BaseException) -> int:
        self.broken = True
        if not isinstance(error, Exception):
            self.error = error
        status: int = getattr(error, "status", 0) or RankLost.status
        text = f"{error}" if isinstance(error, (RankLost, RankTimeout)) else _sentence(error)
        return int(_c.lib.fattn_transport_fail(status, text.encode()))

    @contextlib.contextmanager
    def running_ahead(self) -> Iterator[None]:
        """While it lasts, the host waits for messages one group late. Not where it reads what they bring."""
        self.runs_ahead = True
        try:
            yield
        finally:
            self.runs_ahead = False

    def catch_up(self, seconds: float) -> None:
        """Waits for the messages that the host has not waited for."""
        if not self.broken:
            self.finish(self.before, seconds)
            self.before = []

    # --- Their parts ------------------------------------------------------------------------------

    def _bytes(self, address: int, size: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
        return torch.as_tensor(_DeviceBytes(address, size), device=self.device)

    def _begin(self, m: Any, whom: str, data: torch.Tensor) -> Any:
        with self.lost(whom):
            if m.receive:
                return dist.irecv(data, group=self.group, group_src=m.peer, tag=_TAG + m.tag)
            return dist.isend(data, group=self.group, group_dst=m.peer, tag=_TAG + m.tag)

    @contextlib.contextmanager
    def lost(self, whom: str) -> Iterator[None]:
        """Raises RankLost for the RuntimeError by which a backend reports that sending or receiving failed, with the
        reason of the rank that has given up, if it sent one."""
        try:
            yield
        except RuntimeError as error:
            self.broken = True
            raise RankLost(self._heard() or f"{whom}: {_sentence(error)}") from None

    def finish(self, works: list[tuple[Any, str]], seconds: float) -> None:
        """Waits for works, each of which comes with the name of the rank that it depends on."""
        begin = time.monotonic()
        end = begin + min(seconds, _FOR_EVER)
        for work, whom in works:
            try:
                if self.is_gloo:
                    work.wait(timedelta(seconds=max(end - time.monotonic(), 1e-3)))
                    continue
                while not work.is_completed():
                    now = time.monotonic()
                    if now > end:
                        raise RuntimeError("Timed out")
                    time.sleep(_NAP if now > begin + _SOON else 0)
                work.wait()
            except RuntimeError as error:
                self.broken = True
                if "Timed out" in str(error):
                    raise RankTimeout(f"{whom} did not answer in {seconds:g} s") from None
                raise RankLost(self._heard() or f"{whom}: {_sentence(error)}") from None

    def _receive_reason(self, peer: int) -> tuple[Any, torch.Tensor]:
        text = torch.zeros(_REASON, dtype=torch.uint8)
        with self.lost(f"rank {peer}"):  # another rank may have given up before this one begins
            return dist.irecv(text, group=self.group, group_src=peer, tag=_TAG_REASON), text

    def _heard(self) -> str | None:
        """The reason that a rank sent before it gave up; None if there is none."""
        for peer, (work, text) in self.reasons.items():
            try:
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue
            reason = bytes(text.tolist()).rstrip(b"\0").decode("utf-8", "replace")
            return f"rank {peer} gave up: {reason}"
        return None

    def give_up(self, reason: bytes) -> None:
        """Sends the reason to the other ranks, the first time only, and closes the connections."""
        if self.is_gloo and self.reasons:
            text = torch.tensor(list(reason[:_REASON].ljust(_REASON, b"\0")), dtype=torch.uint8)
            others, self.reasons = list(self.reasons), {}
            for work in [self._quietly(dist.isend, text, group_dst=p, tag=_TAG_REASON) for p in others]:
                self._quietly_wait(work, 0.05)
            # This message never comes; its timeout closes the connections, so that the others stop waiting.
            never = self._quietly(dist.irecv, torch.empty(1, dtype=torch.uint8), group_src=others[0],
                                  tag=_TAG_NEVER)
            self._quietly_wait(never, 1e-3)
        self.broken = True

    def _quietly(self, operation: Any, tensor: torch.Tensor, **where: Any) -> Any:
        try:
            return operation(tensor, group=self.group, **where)
        except RuntimeError:  # the connection is closed already
            return None

    @staticmethod
    def _quietly_wait(work: Any, seconds: float) -> None:
        try:
            if work is not None:
                work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            pass

    def check(self) -> None:
        """Raises the error that a callback has caught and could not pass through C."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def _backend_for(group: Any, device: torch.device) -> str:
    """The backend that carries tensors of a device: a group may have one for each kind."""
    try:
        name: str = (group or dist.group.WORLD)._get_backend(device).name()
    except RuntimeError:
        raise Unsupported(f"the process group has no backend for tensors on {device.type}") from None
    return name


def _sentence(error: BaseException) -> str:
    return f"{error}".partition(". This is")[0].partition("\n")[0] or type(error).__name__
