"""Counts the operations of library calls and hand-written kernels, by their names and shapes.

Covers custom calls, and the ops that compilers turn into custom calls. A kernel may state its own
cost, as Pallas kernels do (`cost_estimate`). For the others, the textbooks' counts apply:

    attention          2 products forward and 5 backward (3 and 4 where two kernels share them),
                       over the pairs of query and key that the mask lets see each other
    cholesky           n^3 / 3
    LU                 m n^2 - n^3 / 3                              (m >= n)
    QR                 2 m n^2 - 2 n^3 / 3; its Q as many
    eigh               9 n^3, without vectors 4 n^3 / 3;  eig: 25 n^3, without vectors 10 n^3
    SVD                6 m n^2 + 20 n^3, without vectors 2 m n^2 + 2 n^3
    triangular solve   n^2 for each right-hand side
    FFT                5 n log2 n for n points, half of it for real ones; a pass over memory for
                       each 2^12 points of each dimension
    top k              a comparison for each element and each halving down to k

Sources: Golub and Van Loan, "Matrix Computations", 4th edition, 4.2, 3.2, 5.2, 8.3, 7.5 and 8.6;
Dao et al., "FlashAttention", arXiv 2205.14135; Van Loan, "Computational Frameworks for the FFT";
Tolmachev, "VkFFT", IEEE Access 11, 2023 (single uploads of up to 2^12 points).

Factorisations run in full precision with short depths, and are counted as vector operations. Their
columns depend on each other, which takes most of the time up to some thousand columns
(`Factorisation`):

                us a column, from                                           passes over the matrix
    cholesky    0.7  512 of f32 in 376 us: pytorch/pytorch, pull 173515          1
    QR, its Q     3  32 of f32 in 189 us, both, H100: pull 173788               48
    LU           10  4,096 of f32 in 44 ms, A100: jax-ml/jax, issue 9694        48
    eigh         18  100 of f32, 1.8 ms: pytorch/pytorch, issue 174674       n / 3
    eig         490  4,096 of c128 in 2 s, GH200: icl-utk-edu/magma, 51    2 n / 3
    SVD          90  256 of f64, 23 ms, A100: tensor4all/tenferro-rs, 1720 2 n / 3

A column of QR or LU reads its panel of 32 columns twice, and writes it. A column of a reduction to
tridiagonal form reads the rest of the matrix once. To bidiagonal or Hessenberg form, it reads the
rest twice (Dongarra et al., "The singular value decomposition", SIAM Review 60, 2018). No such
times of TPUs are published. There these hold, too, because XLA:TPU runs a loop over columns.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from stablehlo_tools.cost.element_operations import element_operations
from stablehlo_tools.cost.kernels import KernelWork, Matmul, WorkKind

_EXPONENTIAL = element_operations("exponential")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An operand or a result: its shape, element type (in StableHLO's spelling) and bytes."""

    dims: tuple[int, ...]
    dtype: str
    bytes: float

    @property
    def elements(self) -> float:
        """The number of elements."""
        return float(math.prod(self.dims))


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """A custom call by its target, or an op by its name.

    `config` is the backend config, as text. `kernel` is the name of the kernel or of its place in
    the program. `lengths` are those of an FFT.
    """

    target: str
    operands: Sequence[Tensor]
    results: Sequence[Tensor]
    config: str = ""
    kernel: str = ""
    lengths: Sequence[int] = ()

    @property
    def bytes(self) -> float:
        """The bytes of all operands and results, each once.

        A call of XLA's own (`__…`) returns its workspace as an array of i8, which is left out.
        """
        workspace = ("i8", "ui8") if self.target.startswith("__") else ()
        wrote = sum(t.bytes for t in self.results if t.dtype not in workspace)
        return wrote + sum(t.bytes for t in self.operands)


def call_work(call: LibraryCall) -> KernelWork | None:
    """Returns the work of a call; None if only its bytes are known.

    The cost that a kernel states overrides the count by its name.
    """
    if _HAND_WRITTEN.fullmatch(call.target):
        return _pallas_cost(call) or _by_kernel(call)
    if call.target.startswith("__cudnn$fmha"):
        return _cudnn_attention(call)
    if _RAGGED.fullmatch(call.target):
        # Each group of rows has its own matrix. The operations are those of a single matrix.
        if len(call.operands) < 2 or not call.results or len(call.operands[0].dims) < 2:
            return None
        rows, depth = call.operands[0].dims[-2:]
        batch = math.prod(call.operands[0].dims[:-2])
        product = Matmul(batch, rows, call.results[0].dims[-1], depth)
        return KernelWork(WorkKind.MATMUL, call.bytes, 0.0, (product,), _float_type(call))
    for pattern, count in _COUNTED:
        if pattern.fullmatch(call.target) and all(t.dims for t in call.operands[:1]):
            kind = WorkKind.SORT if call.target.startswith(_SORTS) else WorkKind.LIBRARY
            moved, steps = call.bytes, 0.0
            if count is _fft:
                moved *= _fft_passes(call)
            elif (kind_of := factorisation(call.target)) is not None:
                moved, steps = kind_of.traffic(call), kind_of.steps_ns(call)
            return KernelWork(kind, moved, count(call), (), _float_type(call), steps_ns=steps)
    return None


@dataclass(frozen=True, slots=True)
class Factorisation:
    """A factorisation whose columns wait for each other.

    Each takes `column_ns`. If it `is_batched`, the matrices of a batch run together. `passes`
    returns how often the matrix is read or written, by its number of columns.
    """

    column_ns: float
    is_batched: bool
    passes: Callable[[int], float]

    def steps_ns(self, call: LibraryCall) -> float:
        """Returns the ns of all columns of a call."""
        *batch, rows, columns = _dims_of_matrix(call)
        return self.column_ns * min(rows, columns) * (1 if self.is_batched else math.prod(batch))

    def traffic(self, call: LibraryCall) -> float:
        """Returns the bytes that a call moves."""
        least = min(_dims_of_matrix(call)[-2:])
        matrix = call.operands[0].bytes if call.operands else 0.0
        return max(call.bytes, self.passes(least) * matrix)


def _dims_of_matrix(call: LibraryCall) -> Sequence[int]:
    dims = call.operands[0].dims if call.operands else ()
    return dims if len(dims) > 1 else (0, 0)


def factorisation(target: str) -> Factorisation | None:
    """Returns the factorisation of a target; None for another."""
    return next((each for pattern, each in _FACTORISATIONS if pattern.fullmatch(target)), None)


def is_qr(target: str) -> bool:
    """Returns True if a target is that of a QR factorisation, or computes its Q."""
    return re.fullmatch(rf"{_QR}|{_Q_OF_QR}", target) is not None


_HAND_WRITTEN = re.compile(
    r"tpu_custom_call|mosaic_gpu\w*|__gpu\$xla\.gpu\.triton|triton_kernel_call"
)
_RAGGED = re.compile(r"((mhlo|chlo)\.)?ragged[-_]dot")
_SORTS = "__cub$DeviceRadixSort"


def _pallas_cost(call: LibraryCall) -> KernelWork | None:
    """Returns the cost that a Pallas kernel for TPUs states in its config; None without one."""
    estimate = _section(call.config, "custom_call_config").get("cost_estimate")
    if not isinstance(estimate, dict):
        return None
    figures = cast("dict[str, Any]", estimate)
    try:
        flops, transcendentals, moved = (
            max(0.0, float(figures.get(name, 0)))
            for name in ("flops", "transcendentals", "bytes_accessed")
        )
    except (TypeError, ValueError):
        return None
    # Neither infinite nor NaN.
    if not flops + transcendentals + moved < math.inf:
        return None
    return KernelWork(
        WorkKind.LIBRARY,
        moved or call.bytes,
        _EXPONENTIAL * transcendentals,
        dtype=_float_type(call),
        matrix_flops=flops,
    )


# The attention kernels of jax, by their own names or those around them: the number of products, and
# the dimension of the sequence. TPU kernels have arrays of [batch, heads, sequence, depth], Triton
# kernels of [batch, sequence, heads, depth].
_ATTENTIONS = (
    (re.compile(r"flash_(attention|mha_bwd)_dkv|splash_m[hq]a_dkv"), 4, -2),
    (re.compile(r"flash_(attention|mha_bwd)_dq|splash_m[hq]a_dq"), 3, -2),
    (re.compile(r"mha_backward"), 5, -3),
    (re.compile(r"flash_attention|splash_m[hq]a"), 2, -2),
    (re.compile(r"mha_forward"), 2, -3),
)
_NAMED = re.compile(r'\bname = "[^"]*"')  # in Triton's configuration


def _by_kernel(call: LibraryCall) -> KernelWork | None:
    """Returns the work of an attention kernel that is known by its name; else None."""
    arrays = [t for t in call.operands if _is_float(t.dtype) and len(t.dims) >= 3]
    if len(arrays) < 3:
        return None
    named = _NAMED.search(call.config)
    names = call.kernel + (named.group() if named else "")
    for pattern, products, sequence in _ATTENTIONS:
        if pattern.search(names):
            query, key, value = (t.dims for t in arrays[:3])
            batch = math.prod(query[:-1]) // max(1, query[sequence])
            sizes = _AttentionSizes(batch, query[sequence], key[sequence], query[-1], value[-1])
            return _attention(call, sizes, products, sizes.keys)
    return None


@dataclass(frozen=True, slots=True)
class _AttentionSizes:
    """Sizes of attention: batch times heads, queries, keys, depth of keys, depth of values."""

    batch: int
    queries: int
    keys: int
    depth: int
    width: int


def _attention(call: LibraryCall, sizes: _AttentionSizes, products: int, seen: int) -> KernelWork:
    """Returns the work of `products` products, where a query sees `seen` keys on average.

    Forward: the scores, and the scores times the values. Backward: the scores again, their
    gradient, and the gradients of values, keys and queries.
    """
    scores = Matmul(sizes.batch, sizes.queries, seen, sizes.depth)
    weighed = Matmul(sizes.batch, sizes.queries, sizes.width, seen)
    back = Matmul(sizes.batch, sizes.queries, seen, sizes.width)
    of_values = Matmul(sizes.batch, seen, sizes.width, sizes.queries)
    of_keys = Matmul(sizes.batch, seen, sizes.depth, sizes.queries)
    of_queries = Matmul(sizes.batch, sizes.queries, sizes.depth, seen)
    matmuls = {
        2: (scores, weighed),
        3: (scores, back, of_queries),
        4: (scores, back, of_values, of_keys),
        5: (scores, back, of_values, of_keys, of_queries),
    }[products]
    softmax = _EXPONENTIAL * sizes.batch * sizes.queries * seen
    return KernelWork(WorkKind.LIBRARY, call.bytes, softmax, matmuls, _float_type(call))


def _cudnn_attention(call: LibraryCall) -> KernelWork | None:
    """Returns the work of cuDNN's fused attention; its config gives the order of dimensions."""
    config = _section(call.config, "cudnn_fmha_backend_config")
    if len(call.operands) < 3 or any(len(t.dims) != 4 for t in call.operands[:3]):
        return None
    query, key, value = (t.dims for t in call.operands[:3])
    numbers = config.get("bmm1_dot_dimension_numbers")
    batching = cast("dict[str, Any]", numbers) if isinstance(numbers, dict) else {}
    # With batch dimensions 0 and 1, the heads come before the sequence.
    heads = 1 if [str(d) for d in batching.get("lhs_batch_dimensions", ())] == ["0", "1"] else 2
    sequence = 3 - heads
    sizes = _AttentionSizes(
        query[0] * query[heads], query[sequence], key[sequence], query[3], value[3]
    )
    window = config.get("sliding_window_length", 0)
    # The keys that a query sees on average. A causal mask shows those up to its own position; a
    # window shows only the last so many of them.
    seen = sizes.keys
    if "CAUSAL" in str(config.get("mask_type", "")):
        most = min(sizes.keys, (int(window) if str(window).isdecimal() else 0) or sizes.keys)
        rising = min(sizes.queries, most)
        pairs = rising * (rising + 1) // 2 + (sizes.queries - rising) * most
        seen = max(1, -(-pairs // max(1, sizes.queries)))
    return _attention(call, sizes, 5 if "Backward" in call.target else 2, seen)


def _matrix(call: LibraryCall) -> tuple[float, float, float]:
    """Returns the number of matrices, and the longer and the shorter side of each.

    A complex matrix counts as four, because a complex product is four real ones.
    """
    matrix = call.operands[0] if call.operands else _NONE
    if len(matrix.dims) < 2:
        return 0.0, 0.0, 0.0
    count = math.prod(matrix.dims[:-2]) * (4 if matrix.dtype.startswith("complex") else 1)
    return float(count), float(max(matrix.dims[-2:])), float(min(matrix.dims[-2:]))


def _cholesky(call: LibraryCall) -> float:
    count, _, n = _matrix(call)
    return count * n**3 / 3


def _eliminations(passes: float) -> Callable[[LibraryCall], float]:
    """Returns a counter of `passes` · (m n^2 - n^3 / 3) operations, as in LU and QR."""

    def count(call: LibraryCall) -> float:
        matrices, m, n = _matrix(call)
        return matrices * passes * n**2 * (m - n / 3)

    return count


def _of_matrices(with_vectors: float, without: float) -> Callable[[LibraryCall], float]:
    """Returns a counter of a multiple of n^3, which depends on whether vectors are returned."""

    def count(call: LibraryCall) -> float:
        matrices, _, n = _matrix(call)
        return matrices * n**3 * (with_vectors if _vectors(call) else without)

    return count


# The solver returns no vectors: 78 is LAPACK's "N"; `compute_uv` is the option of the GPU solvers.
_VALUES_ONLY = re.compile(r"compute_uv = false|mode = 78\b|compute_right = 78\b")
_NONE = Tensor((), "f32", 0.0)


def _svd(call: LibraryCall) -> float:
    count, m, n = _matrix(call)
    return count * (6 * m * n**2 + 20 * n**3 if _vectors(call) else 2 * m * n**2 + 2 * n**3)


def _vectors(call: LibraryCall) -> bool:
    """Returns True if a decomposition returns its vectors, not only values."""
    if _VALUES_ONLY.search(call.config):
        return False
    n = min(call.operands[0].dims[-2:]) if call.operands else 0
    return any(len(t.dims) >= 2 and min(t.dims[-2:]) >= n > 0 for t in call.results)


def _triangular_solve(call: LibraryCall) -> float:
    if len(call.operands) < 2:
        return 0.0
    parts = 4 if call.operands[0].dtype.startswith("complex") else 1
    return parts * call.operands[1].elements * call.operands[0].dims[-1]


def _fft(call: LibraryCall) -> float:
    points = max((t.elements for t in (*call.operands, *call.results)), default=0.0)
    real = any(not t.dtype.startswith("complex") for t in (*call.operands, *call.results))
    return (2.5 if real else 5.0) * points * sum(math.log2(max(2, n)) for n in _fft_lengths(call))


def _fft_passes(call: LibraryCall) -> int:
    """Returns how often an FFT reads and writes its points in memory.

    Each dimension takes a pass, a long one several: 2^12 points fit on the chip."""
    return sum(-(-max(1, n - 1).bit_length() // 12) for n in _fft_lengths(call))


def _fft_lengths(call: LibraryCall) -> Sequence[int]:
    return call.lengths or (call.operands[0].dims[-1:] if call.operands else ())


def _top_k(call: LibraryCall) -> float:
    kept = call.results[0].dims[-1] if call.results and call.results[0].dims else 1
    return call.operands[0].elements * math.log2(max(2, kept)) if call.operands else 0.0


def _each_element(operations: float) -> Callable[[LibraryCall], float]:
    return lambda call: operations * sum(t.elements for t in call.results)


_SOLVER = r"(?:(?:cu|hip)(?:solver|blas)_|lapack_[sdczh]?|__cusolver\$)"
_CHOLESKY = rf"[Cc]holesky|{_SOLVER}(potrf\w*|cholesky)"
_LU = rf"LuDecomposition|LuRealDecompositionBlock|{_SOLVER}getrf\w*"
_QR = rf"Qr|QrDecompositionBlock|{_SOLVER}geq(rf|p3)\w*"
_Q_OF_QR = rf"ProductOfElementaryHouseholderReflectors|{_SOLVER}(or|un)gqr\w*"
_EIGH = rf"Eigh|{_SOLVER}(sy|he)ev\w*"
_SVD = rf"{_SOLVER}ge(s?dd|svd|sdd)\w*"
_EIG = rf"{_SOLVER}geev\w*"
_COUNTED: tuple[tuple[re.Pattern[str], Callable[[LibraryCall], float]], ...] = tuple(
    (re.compile(pattern), count)
    for pattern, count in (
        (_CHOLESKY, _cholesky),
        (_LU, _eliminations(1)),
        (_QR, _eliminations(2)),
        (_Q_OF_QR, _eliminations(2)),
        (_EIGH, _of_matrices(9, 4 / 3)),
        (_SVD, _svd),
        (_EIG, _of_matrices(25, 10)),
        (rf"{_SOLVER}gehrd\w*", _of_matrices(10 / 3, 10 / 3)),
        (rf"{_SOLVER}(sy|he)trd\w*", _of_matrices(4 / 3, 4 / 3)),
        (r"InvertDiagBlocks(Lower|Upper)Triangular", _cholesky),
        (
            rf"triangular[-_]solve|__cublas\$triangularSolve|{_SOLVER}trsm\w*|blas_\w?trsm\w*",
            _triangular_solve,
        ),
        (r"fft|__cufft\$.*", _fft),
        (
            r"top_?k|(__gpu\$)?TopK|(mhlo|chlo)\.top_?k|ApproxTopK|PartialReduce|AggregateToTopK|"
            r"stablehlo\.dynamic_(approx_)?top_k",
            _top_k,
        ),
        (r"(cu|hip)_threefry2x32\w*", _each_element(element_operations("rng"))),
        (r"__cudnn\$norm.*|batch[-_]norm[-_](training|inference|grad)", _each_element(8)),
        (
            r"__cub\$.*|(cu|hip)_lu_pivots_to_permutation|X64(Combine|SplitLow|SplitHigh)|"
            r"GatherScatterIndicesBitpacked|AllocateBuffer|CreateBuffer|Pin|Unpin|PadToStatic|SliceToDynamic|SetBound|"
            r"MoveTo(Host|Device)|Resize(Nearest|Bilinear)(Grad)?",
            _each_element(0.0),
        ),
    )
)


_PANEL = 32  # columns of a panel of QR or LU


def _of_panels(columns: int) -> float:
    return 1.5 * min(columns, _PANEL)


_FACTORISATIONS: tuple[tuple[re.Pattern[str], Factorisation], ...] = tuple(
    (re.compile(pattern), Factorisation(ns, is_batched, passes))
    for pattern, ns, is_batched, passes in (
        (_CHOLESKY, 700.0, True, lambda _: 1.0),
        (_LU, 10e3, False, _of_panels),
        (_QR, 3e3, False, _of_panels),
        (_Q_OF_QR, 3e3, False, _of_panels),
        (_EIGH, 18e3, True, lambda columns: columns / 3),
        (_SVD, 90e3, False, lambda columns: 2 * columns / 3),
        (_EIG, 490e3, False, lambda columns: 2 * columns / 3),
    )
)


def _section(config: str, name: str) -> dict[str, Any]:
    """Returns the object `name` of a config that begins with JSON; {} if there is none."""
    try:
        read: object = json.JSONDecoder().raw_decode(config)[0]
    except (ValueError, RecursionError):
        return {}
    section = cast("dict[str, object]", read).get(name) if isinstance(read, dict) else None
    return cast("dict[str, Any]", section) if isinstance(section, dict) else {}


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("f", "bf"))


def _float_type(call: LibraryCall) -> str:
    """Returns the element type of a kernel's products: that of its first operand of floats."""
    return next((t.dtype for t in call.operands if _is_float(t.dtype)), "f32")
