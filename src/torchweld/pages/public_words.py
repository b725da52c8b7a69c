"""Words that say nothing about a user's model: of torchweld's own sentences, and of kernels' names.

A kernel of a vendor's library is known by its words, since nobody has a list of all such kernels:
each word of the name has to be here. A name with another word in it is taken for a user's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

import torchweld

WORD = re.compile(r"[^\W\d]\w*")
_PACKAGE = Path(torchweld.__file__).parent
# Sources whose texts nobody is told: where models are made, and lists of public words.
_MODELS = "models"
_NOT_SAID = (f"{_MODELS}/", "pages/public_")
_OPTION = re.compile(r"--[a-z][a-z-]*")


@cache
def own_words() -> frozenset[str]:
    """Every word that torchweld's own texts consist of, in lower case; no name of a model."""
    words = (word.lower() for text in _own_texts() for word in WORD.findall(text))
    models = {path.stem for path in (_PACKAGE / _MODELS).glob("*.py")}
    return frozenset((*words, "pageable")) - models


@cache
def own_options() -> frozenset[str]:
    """Options of torchweld's command line."""
    return frozenset(option for text in _own_texts() for option in _OPTION.findall(text))


@cache
def _own_texts() -> tuple[str, ...]:
    """Every text in torchweld's sources that can be said to a user."""
    return tuple(
        text
        for path in sorted(_PACKAGE.rglob("*.py"))
        if not path.relative_to(_PACKAGE).as_posix().startswith(_NOT_SAID)
        for text in _texts_of(ast.parse(path.read_text("utf-8")))
    )


def _texts_of(tree: ast.AST) -> Iterator[str]:
    """Texts other than docstrings; and arguments, which errors name: "give budget_s=32"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # a docstring; its node is walked later
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.arg):
            yield node.arg


# ---- kernels ----

_KERNEL_WORDS = """
abs acc accdouble access accessor accumop accumulate accumulator adagrad adam adamw adaptive add
addr affine agent algorithm alibi align aligna alignc alignment all allgather allreduce
allreducering alltoall alpha ampere and anonymous antialias any apply arange arch argmax argmin
args arr array assign async atomic attention attn auto average avg axpby axpy backend backward
base based batch batched batchnorm bcast beta bfloat bgrad bias bicubic bidirectional bilinear
binary bitonic bits bitwise block blocks bool bound broadcast bucket buffer builtin bulk bwd byte
cache calc calculate calculator call cask cast cat causal celu cfft channel channels char charlong
chunk clamp cluster codegen col collective collnet cols column combine compact compare complex
compose compositions compound compute config const constant context contiguous conv convolution
convolve cooley coop cooperative coord copy copyable core cos cosine count cross cta ctas cub
cublas cublaslt cuda cudnn cummax cummin cumprod cumsum curand curandstate curandstatephilox cute
cutlass cvt data dbias ddd decay decltype decode default deleted dense depth depthwise dequant
deque descriptor detail dev device devkernel dgemm dgrad diag dilated dim dims direct dispatch
distribution div divide divisor dkv dot double drop dropout dtype dynamic dynamicsmem elem element
elements elementwise elt elu embedding empty enable engine enum epi epilogue epiloguevisitor equal
equality erf exclusive execute exp explicit ext external false fast fermi ffma fft fill filter
finalize find finish finite first fixed flash flatten flip float floor fma fmha forcealign foreach
forward fprop from full func funcs function functional functor fused fusion fwd gamma gather
gatherscatter gcgemm gelu gemm gemmk gemmsn gemmt gemv gemvk gemvnsp gemvx gen generator generic
ger get global glu gpu gqa grad gradient grads grid group grouped groups grp half hardsigmoid
hardswish hardtanh has head heads helper hermitian hgemm hidden high histogram hmma hopper host
hsh hss igemm imma impl implicit index indexed indexer indexing indices inf info init inner
inplace input inputs int integer interior interleaved internal interp intlist intrinsic inverse
item items iter iteration iterator kernel kernels kernelsmall key kreduce lambda lanczos large
last launch layer layernorm layout layouts leaf leaky left length less limits linear list lists
load loader local locked log logical logits logsoftmax logsumexp long longlong loop loss low lower
lut magma mainloop major make map mask masked matmul matrix max maximum maxwell mean median mem
memcpy memory memset memtype merge mersenne meta metadata mha min minimum minmax mish mma mode
modified modifier moment moments momentum more mqa mse mufu mul multi multihead multiple multiply
multistage mutable namespace nan nanmedian narrow native nccl ncclwork nchw nchwto ncwh ndhwc
nearest neg negative nesterov nhwc nhwckrsc nhwcto nll nnn nnt nocast noinc non none norm normal
normalize not nozero ntn ntt null nullary nullptr num number numerics nvfuser nvjet nvls occupancy
off offset offsets one onesweep opaque operation operator operators opmath ops opt optimized order
other out outer output outputs overlap pack packed pad padded padding paged parallel param params
partial partition pass path per permute persistent persistentkernel philox pingpong pinned
pipeline pitch plus pod point pointer pointers pointwise policy polynomial pool pooling post pow
pre precision predicate predicated prefetch prefetched prefix prelu prep prod product prop ptr
ptrarray ptrs ptrx ptx qkv qqtst quant quantile quantize quantized query quick radix ragged rand
random range rank rdc read rectified recv reduce reduced reducer reducescatter reduction ref
reference reflect reg region regs regular relu remap reshape resize restrict reverse rfft ring rms
rng rocclr roll rope rotary round row rows rowwise rrelu run runtime save scalar scalars scale
scaled scaling scan scatter scudnn sdpa search searchsorted second segment segmented select
selector self selu send sendrecv sep seq seqlen seqlenk sequence set sgd sgemm sgemmnn shape
shared shfl shift short sig sigmoid sign signed silu simple simt sin single size sized sizes skip
slice sliced slices sliding small smem smooth smx soft softmax softplus sort sorted source sparse
spatial spec specializations specialized split splitk splitkv splitter sqrt square sss stage
stages standard start state static std step storage storageoffset store straight stream stride
strided strides strip strm struct structure sub sum svd swap swish switch swizzle symmetric sync
table tail tan tanh target task template templates tensor tensorbase tensorop tensors ternary test
thread threads threefry threshold thrust tile tiled tilesize time tma tnn tnt tonchw tonhwc top
topk torchweld total tpp trait traits transform transpose transposed tree tri triangular tril
trilinear triton triu trivial true tss tst ttn ttt tukey tuple turing twiddle two type types uchar
ucvt uint ull ulong ulonglong unaligned unary unfold uniform uninitialized union unique universal
unordered unpack unroll unrolled unrolling unsigned unsorted unweighted update upper upsample use
user ushort using util utils val valid value values var variable variance varlen vec vecsize
vector vectorize vectorized version view visitor void volatile volta wait warp warpgroup warps
warpsize warpspecialized weight weighted weights welford wgmma wgrad where while wide width
winograd with without word work worker workspace wrapper write xgemm xmma xor xregs zero zeros zip
"""

# Tensile, AMD's maker of matrix products, writes its settings into the name, each in capitals.
_TENSILE = re.compile(r"Cijk_A[ijkl]{2,4}_B[ijkl]{2,4}(_[A-Za-z0-9]+)+(\.kd)?")
_TENSILE_SETTINGS = frozenset(
    """
    AAIGTEN AAV ABDF AFC AFEM AMAS APM ASAE ASBE ASCE ASEM ASGT ASLT ASM BBS BIAS BJLK BUFFER
    BUS CADS CLR CLS DDSB DKP DPKLDSVW DPLB DSDP DTL DTLA DTLB DTLM DTVA DTVB DTVSM EDEP EPS
    ETSP FDSI GLS GLVWA GLVWB GRCGA GRCGB GRPM GRVW GRVWA GRVWB GSU GSUAMB GSUASB GSUC GSUWGMRR
    HBH HHS HSS ISA KLA KLS LBSPP LBSPPA LBSPPB LBSPPM LDL LDSB LDSTI LPA LPB LPM LRVW LRVWA
    LRVWB LWPM MAC MDA MGRIPM MIAV MIWT MKFGSU MMAOP NEPBS NLCA NLCB NTA NTB NTC NTD NTE NTM
    NTWS NVN NVNA NVNB ONLL OPLV PAP PBD PGR PKA PKAB PLR PSD SAB SAV SCIUI SGR SGRO SGROB SIA
    SIP SKFDPO SKFTR SKXCCM SLW SNLL SPO SRVW SSO STM SUM SUS SVW SVWA SVWB TDS TLDS TLDSM TSGR
    TSGRA TSGRB TSM TWGR ULSGRO UMF UMLDSA UMLDSB UPLRP USERARGS USFGRO USFGROM USFGRON VAW
    VFLRP VGPRF VSN VWA VWB WGM WGMXCC WGMXCCG WGR WGRA WSGRA WSGRB WSK ZGEMM
    """.split()  # noqa: SIM905 (a list of 160 would fill a screen)
)
_CAMEL = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_LETTERS = re.compile(r"[A-Za-z]+")


@cache
def _kernel_words() -> frozenset[str]:
    """Those above, and the words of the names of torch's ops."""
    of_ops = (word for name in aten_names() for word in re.findall(r"[a-z]+", name.lower()))
    return frozenset((*_KERNEL_WORDS.split(), *of_ops))


def of_kernel_words(name: str) -> bool:
    """Whether every word of a kernel's name is a common one; two letters are no word."""
    if not name.isascii():
        return False
    if _TENSILE.fullmatch(name):
        return all(_is_setting(part) for part in name.split("_")[3:])
    words = (word.lower() for word in _CAMEL.findall(name))
    return all(len(word) <= 2 or word in _kernel_words() for word in words)


def _is_setting(part: str) -> bool:
    """ "MT64x16x16", "ISA90a", "GRVWA1", "NTn1"."""
    # "n" is the sign of a number below 0.
    runs = (run.removesuffix("n").upper() for run in _LETTERS.findall(part.removesuffix(".kd")))
    return all(len(run) <= 2 or run in _TENSILE_SETTINGS for run in runs)


# ---- ops ----


@cache
def aten_names() -> frozenset[str]:
    """The names of torch's ops without their library: "mm", "native_layer_norm"."""
    spaces = ("aten", "prims")
    return frozenset(
        name.partition(".")[0]
        for space, _, name in (one.partition("::") for one in op_names())
        if space in spaces
    )


def op_names() -> tuple[str, ...]:
    """Every op that is registered now, with its library and its overload."""
    listed = getattr(torch._C, "_dispatch_get_all_op_names", None)
    return tuple(listed()) if listed is not None else ()
