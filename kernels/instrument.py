"""Instrumented kernels for tests: the same program, which also writes down every access to global memory.

The simulator walks nests, which are declarations; a test compares them with what the OpenCL code does. The production
source is rewritten as text, so that nothing of it depends on instrumentation: pointers to global memory become pointers
to structures of one value, so that whatever reads or writes by another way than those below does not compile, and the
forms in which ``kernels/memory_c.py`` and the bodies access memory become calls that write down and then do the same.

All buffers of a launch lie in one region of ``1 << region_bits`` bytes that begins at a multiple of its size. It begins
with the log, so that a function finds the log by any pointer into the region: no signature changes. The log is the
number of records (uint32), and after HEAD_BYTES the records: four uint32 each, the work group, the work item in it, the
byte in the region, and how many bytes, with WRITE for a store and IMAGE for a texel. Within a work item records are in
program order.
"""

from __future__ import annotations

import re

from kernels.memory_c import MEMORY_CTYPES
from kernels.source import program_source
from kernels.spec import Kernel, Launch
from layoutopt.errors import DeviceError

__all__ = ["HEAD_BYTES", "IMAGE", "RECORD_BYTES", "WHERE", "WRITE", "instrumented_source"]

HEAD_BYTES, RECORD_BYTES = 64, 16
WRITE, IMAGE = 1 << 31, 1 << 30

WHERE = "__kernel void where(__global ulong *out) { out[0] = (ulong)out; }"
"""A program that writes a buffer's address into it."""

_HELPER = re.compile(r"^static (?:float\d+|void) half_(?:load|store)\d+a?\(.*\n", re.MULTILINE)
_POINTER = re.compile(r"__global (const )?(float|half|int|uchar) \*")
_VECTOR = re.compile(r"\(\*\(__global (?:const )?[a-z]+(\d+)\*\)\(")
_TEXEL = re.compile(r"inline float4 texel\(.*?\n}", re.DOTALL)
_ASK = re.compile(r"^#define ASK\(p\) .*$", re.MULTILINE)
_ELEMENT = re.compile(r"^#define (\w+)_ELEM (\w+)_AT\((.*)\)$", re.MULTILINE)
_ASSIGNED = re.compile(r"\b(\w+)_ELEM = ([^;]+);")

_PACK = (
    ("to = &D_AT(", "to = D+D_IDX("),
    ("from = &VALUE", "from = VALUE_PLACE"),
    ("#define PUT(first) to[(E - (first)) * D_STEP]", "#define PUT(first) to + (E - (first)) * D_STEP"),
    ("#define PUT(first) D_AT(d0, d1, d2, d3, d4)", "#define PUT(first) D+D_IDX(d0, d1, d2, d3, d4)"),
    ("#define GET(X) from[(X - low) * S_STEP]", "#define GET(X) log_get(from + (X - low) * S_STEP)"),
)
"""The forms of ``convolution_pack.cl``, which keeps pointers to where it is."""
_PACK_ASSIGNED = re.compile(r"PUT\(e_first\) = ([^;]+);")
_PACK_VALUE = re.compile(r"^#define VALUE S_AT\((.*)\)$", re.MULTILINE)

_LOG = """
typedef struct {{ float v; }} log_float;
typedef struct {{ int v; }} log_int;
typedef struct {{ uchar v; }} log_uchar;
typedef struct {{ ushort v; }} log_half;
#define OVERLOADED static __attribute__((overloadable))
static void log_access(const ulong at, const uint what)
{{
    volatile __global uint *log = (volatile __global uint *)(at >> {bits} << {bits});
    const uint n = atomic_inc(log);
    if (n >= {most}u) return;
    log += {head} / 4 + n * 4;
    log[0] = get_group_id(0) + get_num_groups(0) * (get_group_id(1) + get_num_groups(1) * get_group_id(2));
    log[1] = get_local_id(0) + get_local_size(0) * (get_local_id(1) + get_local_size(1) * get_local_id(2));
    log[2] = (uint)(at & ((1ul << {bits}) - 1));
    log[3] = what;
}}
"""

_SCALAR = """
OVERLOADED {value} log_get(__global const log_{memory} *p)
{{
    log_access((ulong)p, sizeof(*p));
    return {load};
}}
OVERLOADED void log_set(__global log_{memory} *p, const {value} x)
{{
    log_access((ulong)p, sizeof(*p) | {write}u);
    {store};
}}
"""

_WIDE = """
OVERLOADED {value}{n} {get}(__global const log_{memory} *p)
{{
    log_access((ulong)p, {n} * sizeof(*p));
    return {load};
}}
OVERLOADED void {set}
{{
    log_access((ulong)p, {n} * sizeof(*p) | {write}u);
    {store};
}}
"""

_IMAGE = """inline float4 texel(__read_only image1d_buffer_t image, __global const log_{memory} *base, const int at) {{
    log_access((ulong)(base + (at >> 2) * 4), 4 * sizeof(*base) | {image}u);
    return read_imagef(image, at >> 2);
}}"""


def instrumented_source(kernel: Kernel, launch: Launch, region_bits: int, most: int) -> str:
    """The source of a launch that also writes down its accesses; see the module docstring.

    An operand that is read through an image has one argument more: its buffer.

    Args:
        kernel: whose launch it is.
        launch: one of its launches.
        region_bits: log2 of the region's bytes.
        most: records that the log has room for; more are counted, not kept.

    Raises:
        DeviceError: the source has a form that is not known here.
    """
    text = _HELPER.sub("", program_source(kernel, launch))
    dtypes = {name: kernel.operand_dtype(position) for name, position in launch.operands}
    images = {name for name, position in launch.operands if position in launch.images}
    text = _bodies(text, launch.body)
    text = _VECTOR.sub(lambda m: f"log_vector{m[1]}((", text)
    text = _calls(text, r"log_vector(\d+)\(", "log_vector", "log_vector_set")
    text = _calls(text, rf"\(\*\((?=(?:{'|'.join(dtypes)})\+)", "log_get", "log_set")
    text = _POINTER.sub(lambda m: f"__global {m[1] or ''}log_{m[2]} *", text)
    for name in images:
        text = _through_image(text, name, MEMORY_CTYPES[dtypes[name]])
    if images:
        (memory,) = {MEMORY_CTYPES[dtypes[name]] for name in images}
        text = _TEXEL.sub(_IMAGE.format(memory=memory, image=IMAGE), text)
    return _helpers(region_bits, most) + _ASK.sub("#define ASK(p)", text)


def _helpers(region_bits: int, most: int) -> str:
    out = [_LOG.format(bits=region_bits, most=most, head=HEAD_BYTES)]
    for memory, value in (("float", "float"), ("int", "int"), ("uchar", "uchar")):
        plain = f"(__global const {value} *)p"
        own = f"(__global {value} *)p"
        out.append(_SCALAR.format(memory=memory, value=value, load="p->v", store="p->v = x", write=WRITE))
        for n in (2, 4, 8, 16):
            wide = {"memory": memory, "value": value, "n": n, "write": WRITE}
            wide |= {"load": f"vload{n}(0, {plain})", "store": f"vstore{n}(x, 0, {own})"}
            for get, put in (
                (f"vload{n}(const size_t zero, ", f"vstore{n}(const {value}{n} x, const size_t zero, "),
                (f"log_vector{n}(", f"log_vector_set{n}(const {value}{n} x, "),
            ):
                text = _WIDE.format(get="GET", set=f"{put}__global log_{memory} *p)", **wide)
                out.append(text.replace("GET(", get))
    halves = {"memory": "half", "value": "float", "write": WRITE}
    load, store = "vload_half(0, (__global const half *)p)", "vstore_half_rte(x, 0, (__global half *)p)"
    out.append(_SCALAR.format(load=load, store=store, **halves))
    out.append("OVERLOADED float vload_half(const size_t zero, __global const log_half *p) { return log_get(p); }")
    out.append(
        "OVERLOADED void vstore_half_rte(const float x, const size_t zero, __global log_half *p) { log_set(p, x); }"
    )
    for n in (2, 4, 8, 16):
        bits = f"ushort{n}"
        load = f"vload_half{n}(0, (const half *)&u)"
        reads = f"const {bits} u = vload{n}(0, (__global const ushort *)p); return {load}"
        writes = f"{bits} u; vstore_half{n}_rte(x, 0, (half *)&u); vstore{n}(u, 0, (__global ushort *)p)"
        for aligned in ("", "a"):
            put = f"half_store{n}{aligned}(const float{n} x, __global log_half *p)"
            text = _WIDE.format(n=n, get=f"half_load{n}{aligned}", set=put, load="LOAD", store=writes, **halves)
            out.append(text.replace("return LOAD", reads))
    return "\n".join(out) + "\n"


def _calls(text: str, opening: str, get: str, put: str) -> str:
    """``(*(P))`` becomes ``get(P)`` and ``(*(P)=V)`` ``put(V,P)`` or ``put(P,V)``: ``opening`` is all up to P."""
    out, done = [], 0
    for match in re.finditer(opening, text):
        width = match[1] if match.groups() else ""
        # Where the form is a vector's, its opening has been written as that of a call, with one parenthesis more.
        start = match.end() + (1 if width else 0)
        end = _closing(text, start)
        last = end + 1
        if text[last : last + 1] == ")":
            call, behind = f"{get}{width}({text[start:end]})", last + 1
        elif text[last : last + 1] == "=":
            behind = _closing(text, last + 1)
            value = text[last + 1 : behind]
            arguments = f"{value},{text[start:end]}" if width else f"{text[start:end]},{value}"
            call, behind = f"{put}{width}({arguments})", behind + 1
        else:
            raise DeviceError(f"an access cannot be instrumented: {text[match.start() : last + 40]!r}")
        out += [text[done : match.start()], call]
        done = behind
    return "".join([*out, text[done:]])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis closes that was opened before ``start``."""
    depth = 0
    for at in range(start, len(text)):
        if text[at] == "(":
            depth += 1
        elif text[at] == ")":
            if depth == 0:
                return at
            depth -= 1
    raise DeviceError(f"a parenthesis does not close: {text[start : start + 40]!r}")


def _bodies(text: str, body: str) -> str:
    """The two bodies that assign to elements, or keep pointers to them."""
    if body == "convolution_direct.cl":
        text = _ELEMENT.sub(r"\g<0>\n#define \1_PLACE \2+\2_IDX(\3)", text)
        return _ASSIGNED.sub(r"log_set(\1_PLACE, \2);", text)
    if body == "convolution_pack.cl":
        for form, new in _PACK:
            if form not in text:
                raise DeviceError(f"{body} cannot be instrumented: it has no {form!r}")
            text = text.replace(form, new)
        text = _PACK_VALUE.sub(r"\g<0>\n#define VALUE_PLACE S+S_IDX(\1)", text)
        return _PACK_ASSIGNED.sub(r"log_set(PUT(e_first), \1);", text)
    return text


def _through_image(text: str, name: str, memory: str) -> str:
    """An image's operand stands for three arguments then: the image, its buffer, and where the operand begins."""
    parameter = f"image1d_buffer_t {name}_image, "
    new = text.replace(parameter, f"{parameter}__global const log_{memory} *{name}_base, ")
    return new.replace(f"#define {name} {name}_image, ", f"#define {name} {name}_image, {name}_base, ")
