# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries, read without copying: their address, layout, element type and device.

A Kind knows one library. The methods that every call uses (`key`, `pointer`, `empty`, `stream`) are kept short,
because a small attention takes a few microseconds; only a new problem needs `view`.
"""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from typing import Any, Callable, Iterable, NamedTuple

from fattn import _c, _dlpack
from fattn._dlpack import contiguous_strides as contiguous_strides
from fattn._errors import InvalidArgument, InvalidStride, NullPointer, Unsupported

# An element type of attention: its number in fattn_dtype and its bytes.
FLOATS = {"float32": (_c.F32, 4), "float16": (_c.F16, 2), "bfloat16": (_c.BF16, 2),
          "float64": (_c.F64, 8)}
# Those of k and v: FLOATS, and that of caches in 8 bits.
CACHED = FLOATS | {"float8_e4m3fn": (_c.E4M3, 1)}
_OTHERS = {"bool": 1, "uint8": 1, "int8": 1, "int32": 4, "int64": 8, "uint64": 8}
_BYTES = {name: size for name, (_, size) in CACHED.items()} | _OTHERS


class View(NamedTuple):
    """The facts about an array that planning needs. Strides are in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str          # "cpu", "cuda:0", "hip:1" ...
    writable: bool = True
    known_reach: Reach | None = None  # if the kind has computed it

    def reach(self, name: str) -> Reach:
        """What Kind.check_memory() takes."""
        return self.known_reach or reach(self.shape, self.strides, _BYTES[self.dtype], name)


class Made(NamedTuple):
    """An output that must be allocated."""

    name: str
    dtype: str
    shape: tuple[int, ...]    # in C order
    final: tuple[int, ...]    # as it is returned
    strides: tuple[int, ...]  # of final
    swapped: bool = False     # whether axes 1 and 2 of shape are exchanged in final
    new: Callable[[], Any] | None = None  # makes it, where a kind has a shorter way; see Kind.maker


# Bytes from an array's first element to the end of its last, bytes of an element, name.
Reach = tuple[int, int, str]


def reach(shape: tuple[int, ...], strides: tuple[int, ...], size: int, name: str) -> Reach:
    if 0 in shape:
        return 0, 0, name
    return size * (1 + sum([(n - 1) * s for n, s in zip(shape, strides)])), size, name


class Kind:
    """How to read and allocate arrays of one library."""

    name = "array"
    # Whether `empty` is ordered on the stream that `stream` names, so that workspaces come from it too.
    allocates = False
    # Whether `finish` has nothing to do, and outputs may be views of what `empty` made.
    immediate = True
    # Whether an array's memory may be freed or become shorter while its shape stays.
    shrinks = False

    def key(self, a: Any) -> Any:
        """A hashable value; arrays with equal keys have the same layout."""
        raise NotImplementedError

    def output_key(self, a: Any) -> Any:
        """key() of an array to write to: equal only if both may be written."""
        return self.key(a)

    def view(self, a: Any, name: str) -> View:
        raise NotImplementedError

    def view_for_planning(self, a: Any, name: str) -> View:
        """view(), but of an empty array in C order: libraries disagree about the strides of those."""
        view = self.view(a, name)
        return view._replace(strides=contiguous_strides(view.shape)) if 0 in view.shape else view

    def pointer(self, a: Any) -> int:
        raise NotImplementedError

    def check_memory(self, arrays: Iterable[Any], reaches: Iterable[Reach]) -> None:
        """Raises NullPointer if the memory of an array ends before its elements do."""

    def maker(self, made: Made, device: str) -> Callable[[], Any] | None:
        """A function that allocates an output in less time than make()."""
        return None

    def maker_of_bytes(self, size: int, device: str) -> Callable[[], Any] | None:
        """The same for empty() of this many bytes."""
        return None

    def streams_of(self, device: str) -> Callable[[], int] | None:
        """A function that returns stream() for arrays on a device in less time."""
        return None

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """An array in C order, contents undefined, on the device of `like`."""
        raise NotImplementedError

    def make(self, made: Made, like: Any) -> tuple[Any, Any]:
        """Allocates an output: the array that is written, and the one that is returned. like is q, in backward
        o."""
        a = self.empty(made.shape, made.dtype, like)
        return a, self.transpose(a) if made.swapped else a

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
        """An array in C order of one number, on the device of `like`."""
        raise NotImplementedError

    def spread(self, a: Any, b: Any) -> tuple[Any, Any]:
        """Copies in C order of two arrays, broadcast to one shape."""
        raise NotImplementedError

    def finish(self, a: Any, like: Any, device: int) -> Any:
        """The array from `empty` as the caller gets it, once work on it is queued."""
        return a

    def stream(self, a: Any) -> int | None:
        """The stream of the caller's current work."""
        return None

    def transpose(self, a: Any) -> Any:
        """A view of a rank-4 array with axes 1 and 2 exchanged."""
        return a.transpose(0, 2, 1, 3)


def _known_dtype(dtype: str, name: str) -> str:
    if dtype not in _BYTES:
        allowed = FLOATS if name == "q" else CACHED if name in ("k", "v") else _BYTES
        raise InvalidArgument(f"{name} has dtype {dtype}, which is not one of {', '.join(allowed)}")
    return dtype


class _Numpy(Kind):
    name = "numpy"

    def __init__(self) -> None:
        self.dtypes: dict[str, Any] = {}

    def key(self, a: Any) -> Any:
        return a.shape, a.strides, a.dtype

    def output_key(self, a: Any) -> Any:
        return a.shape, a.strides, a.dtype, a.flags.writeable

    def view(self, a: Any, name: str) -> View:
        dtype = _known_dtype(a.dtype.name, name)
        if not a.dtype.isnative:
            raise InvalidArgument(f"{name} has dtype {a.dtype.str}: not in this machine's byte order")
        size = _BYTES[dtype]
        if any(s % size for s, n in zip(a.strides, a.shape) if n > 1):
            raise InvalidStride(f"strides of {name} are {a.strides} bytes, not multiples of {size}")
        self.dtypes[dtype] = a.dtype
        return View(a.shape, tuple(s // size for s in a.strides), dtype, "cpu", a.flags.writeable)

    def pointer(self, a: Any) -> int:
        try:  # takes a third of the time of the other, which is for what is read-only or strided
            return ctypes.addressof(ctypes.c_char.from_buffer(a))
        except (TypeError, ValueError, BufferError):
            address: int = a.__array_interface__["data"][0]
            return address

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        import numpy
        if dtype not in self.dtypes:  # never bfloat16, which only an input can have brought
            self.dtypes[dtype] = numpy.dtype(dtype)
        return numpy.empty(shape, self.dtypes[dtype])

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
        import numpy
        return numpy.full(shape, value, dtype)

    def spread(self, a: Any, b: Any) -> tuple[Any, Any]:
        import numpy
        a, b = numpy.broadcast_arrays(a, b)
        return a.copy(), b.copy()


class _Torch(Kind):
    name = "torch"
    allocates = True
    shrinks = True

    def __init__(self) -> None:
        self.torch: Any = sys.modules["torch"]
        self.dtypes = {name: getattr(self.torch, name) for name in _BYTES
                       if hasattr(self.torch, name)}
        self.names = {dtype: name for name, dtype in self.dtypes.items()}
        self.gpu = "hip" if getattr(self.torch.version, "hip", None) else "cuda"
        self.pointer = self.torch.Tensor.data_ptr  # type: ignore[method-assign]
        # The handle alone, without an object of torch.cuda.Stream around it.
        self.raw_stream: Any = getattr(self.torch._C, "_cuda_getCurrentRawStream", None)
        # empty_strided() without the dispatcher, as Inductor's programs have it: of host memory, and of the current
        # GPU's.
        guards = getattr(getattr(self.torch._C, "_dynamo", None), "guards", None)
        self.empty_on_host: Any = getattr(guards, "_empty_strided_cpu", None)
        self.empty_on_gpu: Any = getattr(guards, "_empty_strided_cuda", None)
        self.current_gpu: Any = getattr(self.torch._C, "_cuda_getDevice", None)

    def key(self, a: Any) -> Any:
        if a.requires_grad and self.torch.is_grad_enabled():
            raise InvalidArgument("a tensor requires a gradient, which these functions do not record: use "
                                  "fattn.torch, or detach()")
        return a.shape, a.stride(), a.dtype, a.device, a.is_neg()

    def view(self, a: Any, name: str) -> View:
        torch = self.torch
        if a.layout is not torch.strided:
            raise InvalidArgument(f"{name} has layout {a.layout}, not torch.strided")
        if a.is_neg():
            raise InvalidArgument(f"{name} is a view that negates: use resolve_neg()")
        device = {"cpu": "cpu", "cuda": f"{self.gpu}:{a.device.index or 0}"}.get(a.device.type)
        if device is None:
            raise Unsupported(f"{name} is on device {a.device}, neither a CPU nor a GPU that fattn "
                              "knows")
        dtype = self.names.get(a.dtype, str(a.dtype).removeprefix("torch."))
        shape, strides = tuple(a.shape), a.stride()
        known = reach(shape, strides, _BYTES[_known_dtype(dtype, name)], name)
        self.check_memory((a,), (known,))
        return View(shape, strides, dtype, device, True, known)

    def check_memory(self, arrays: Iterable[Any], reaches: Iterable[Reach]) -> None:
        # untyped_storage().resize_() changes the memory of all tensors there, and nothing else about them.
        for a, (needed, size, name) in zip(arrays, reaches):
            try:
                there = a.untyped_storage().nbytes()
            except NotImplementedError:  # under torch.func's transforms, or sparse
                if a.layout is not self.torch.strided:
                    raise InvalidArgument(f"{name} has layout {a.layout}, not torch.strided") from None
                raise Unsupported(f"{name} stands for several tensors and has no memory: use fattn.torch") from None
            if there < needed + size * a.storage_offset():
                raise NullPointer(f"{name} needs {needed + size * a.storage_offset()} bytes of its storage, which has "
                                  f"{there}: it was freed or resized")

    def check_readable(self, a: Any, name: str) -> None:
        """The same for any strided tensor, before PyTorch reads it, which does not check."""
        self.check_memory((a,), (reach(a.shape, a.stride(), a.itemsize, name),))

    def maker(self, made: Made, device: str) -> Callable[[], Any]:
        return self.maker_of(made.final, made.strides, self.dtypes[made.dtype], device)

    def maker_of(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, device: str) -> Callable[[], Any]:
        if device == "cpu" and self.empty_on_host is not None:
            return partial(self.empty_on_host, shape, strides, dtype)
        # (On an H100's host empty() took 20 us more than empty_strided(), with PyTorch 2.11.)
        anywhere = partial(self.torch.empty_strided, shape, strides, dtype=dtype, device=self.device(device))
        if device == "cpu" or self.empty_on_gpu is None or self.current_gpu is None:
            return anywhere
        here = partial(self.empty_on_gpu, shape, strides, dtype)
        current, index = self.current_gpu, self.device(device).index
        return lambda: here() if current() == index else anywhere()

    def device(self, device: str) -> Any:
        return self.torch.device(device.replace("hip", "cuda"))  # as PyTorch calls both

    def maker_of_bytes(self, size: int, device: str) -> Callable[[], Any] | None:
        return self.maker_of((size,), (1,), self.torch.uint8, device)

    def streams_of(self, device: str) -> Callable[[], int] | None:
        return None if device == "cpu" else partial(self.raw_stream, self.device(device).index)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return self.torch.empty_strided(shape, (1,) if len(shape) == 1 else contiguous_strides(shape),
                                        dtype=self.dtypes[dtype], device=like.device)

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
        return self.torch.full(shape, value, dtype=self.dtypes[dtype], device=like.device)

    def spread(self, a: Any, b: Any) -> tuple[Any, Any]:
        a, b = self.torch.broadcast_tensors(a, b)
        return a.contiguous(), b.contiguous()

    def make(self, made: Made, like: Any) -> tuple[Any, Any]:
        a = (made.new or self.maker(made, f"{self.gpu}:{like.get_device()}" if like.is_cuda else "cpu"))()
        return a, a

    def stream(self, a: Any) -> int | None:
        return self.raw_stream(a.get_device()) if a.is_cuda else None


class _Cupy(Kind):
    name = "cupy"
    allocates = True

    def __init__(self) -> None:
        self.cupy: Any = sys.modules["cupy"]
        self.gpu = "hip" if self.cupy.cuda.runtime.is_hip else "cuda"

    def key(self, a: Any) -> Any:
        return a.shape, a.strides, a.dtype, a.device.id

    def view(self, a: Any, name: str) -> View:
        dtype = _known_dtype(a.dtype.name, name)
        size = _BYTES[dtype]
        return View(a.shape, tuple(s // size for s in a.strides), dtype, f"{self.gpu}:{a.device.id}")

    def pointer(self, a: Any) -> int:
        address: int = a.data.ptr
        return address

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        with like.device:
            return self.cupy.empty(shape, like.dtype if like.dtype.name == dtype else dtype)

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
        with like.device:
            return self.cupy.full(shape, value, dtype)

    def spread(self, a: Any, b: Any) -> tuple[Any, Any]:
        a, b = self.cupy.broadcast_arrays(a, b)
        return a.copy(), b.copy()

    def stream(self, a: Any) -> int | None:
        stream: int = self.cupy.cuda.get_current_stream(a.device.id).ptr
        return stream


class _DLPack(Kind):
    """Any library whose arrays have __dlpack__ and which has a from_dlpack, as the array API standard
    wants it: JAX and others."""

    name = "dlpack"
    immediate = False

    def key(self, a: Any) -> Any:
        tensor = _dlpack.describe(a)
        return tensor.shape, tensor.strides, tensor.dtype, tensor.device, tensor.writable

    def view(self, a: Any, name: str) -> View:
        tensor = _dlpack.describe(a)
        return View(tensor.shape, tensor.strides, _known_dtype(tensor.dtype, name), tensor.device,
                    tensor.writable)

    def pointer(self, a: Any) -> int:
        return _dlpack.describe(a).address

    def empty(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        return _dlpack.Memory(shape, dtype, _dlpack.describe(like).device)

    def full(self, shape: tuple[int, ...], value: float, dtype: str, like: Any) -> Any:
        library = _namespace(like)
        return library.full(shape, value, dtype=getattr(library, dtype), device=like.device)

    def spread(self, a: Any, b: Any) -> tuple[Any, Any]:
        library = _namespace(a)
        a, b = library.broadcast_arrays(a, b)
        return library.asarray(a, copy=True), library.asarray(b, copy=True)

    def finish(self, a: Any, like: Any, device: int) -> Any:
        if not isinstance(a, _dlpack.Memory):
            return a
        _c.check(_c.lib.fattn_stream_synchronize(device, None))
        return _dlpack.importer(like)(a)


def _namespace(a: Any) -> Any:
    """The functions of a's library, as the array API standard has them."""
    if not hasattr(a, "__array_namespace__"):
        raise Unsupported(f"the library of {type(a).__module__}.{type(a).__qualname__} has no __array_namespace__, so "
                          "k_descale and v_descale must be two of its arrays, with equal strides")
    return a.__array_namespace__()


kinds: dict[type, Kind] = {}
_made: dict[type[Kind], Kind] = {}
_BY_MODULE: dict[str, type[Kind]] = {"numpy": _Numpy, "torch": _Torch, "cupy": _Cupy}


def _kind_of_type(cls: type, name: str) -> Kind:
    for base in cls.__mro__:
        module, traced = base.__module__.split(".")[0], base.__name__.endswith("Tracer")
        if base.__name__ == "FakeTensor" or traced and module in ("jax", "jaxlib"):
            raise Unsupported(f"a {cls.__name__} has no numbers yet: use fattn.{'jax' if traced else 'torch'}")
        if base.__name__ == "DTensor":
            raise Unsupported(f"{name} is a DTensor, of which this process may have a part: use fattn.torch")
        if base.__name__ == "MaskedArray":
            raise InvalidArgument("the mask of a masked array would be ignored: pass its data, and mask=")
        maker = _BY_MODULE.get(module)
        if maker is not None and base.__name__ in ("ndarray", "Tensor"):
            break
    else:
        if not hasattr(cls, "__dlpack__"):
            qualified = f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
            raise TypeError(f"{name} is of type {qualified}, which is not an array: it has no __dlpack__"
                            + (f"; numpy.asarray({name}) is one" if issubclass(cls, (list, tuple)) else ""))
        maker = _DLPack
    if maker not in _made:
        _made[maker] = maker()
    return _made[maker]


def kind_of(a: Any, name: str = "an argument") -> Kind:
    """The kind of an array, found once for each type; name is for the error."""
    cls = type(a)
    kind = kinds.get(cls)
    if kind is None:
        kind = kinds[cls] = _kind_of_type(cls, name)
    return kind
