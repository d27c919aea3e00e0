"""Tiles of the base, copied in and out in bulk through a ring of buffers; layouts of what is made of them.

A row of K channels is [C, J]: C lines of J consecutive channels, 128 bytes of the base each. Eight lanes
share a line; the other four, and the warps, hold other rows of a tile, or other entries of the log. So a
sum over K is within a thread, but for eight lanes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


@gluon.constexpr_function
def cube(line, num_warps):
    """Layout of [rows or entries, C, J]."""
    return gl.BlockedLayout([1, 1, line // 8], [4, 1, 8], [num_warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def channels(line, num_warps):
    """Layout of [C, J], a vector over K that all rows and entries need."""
    return gl.SliceLayout(0, cube(line, num_warps))


@gluon.constexpr_function
def once(num_warps):
    """Layout of [C, J] that shares a vector over K out among the threads: for what is costly to work out."""
    return gl.BlockedLayout([1, 1], [1, 32], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def column(line, num_warps):
    """Layout of [rows or entries]."""
    return gl.SliceLayout(1, gl.SliceLayout(2, cube(line, num_warps)))


@gluon.constexpr_function
def eighths(num_warps):
    """Layout of [rows or entries, 8 or more]: what the eight lanes of a row hold."""
    return gl.BlockedLayout([1, 1], [4, 8], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def lines(count, line, num_warps):
    """Layout of a tile [R count, J] as a buffer has it: that of cube, a row's lines one after the other."""
    return gl.BlockedLayout([count, line // 8], [4, 8], [num_warps, 1], [1, 0])


@gluon.jit
def channel_offsets(K: gl.constexpr, J: gl.constexpr, layout: gl.constexpr):
    """0 ... K-1 as [C, J]."""
    line = gl.arange(0, K // J, layout=gl.SliceLayout(1, layout))
    within = gl.arange(0, J, layout=gl.SliceLayout(0, layout))
    return line[:, None] * J + within[None, :]


@gluon.jit
def channel_sum(vector):
    """[C, J] -> scalar."""
    return gl.sum(gl.sum(vector, 0), 0)


@gluon.jit
def dots(rows, vector, num_warps: gl.constexpr):
    """[R, C, J] times [C, J], summed as far as a thread can: [R, 8]."""
    R: gl.constexpr = rows.shape[0]
    C: gl.constexpr = rows.shape[1]
    J: gl.constexpr = rows.shape[2]
    products = (rows * vector[None, :, :]).reshape([R, C, 8, J // 8]).permute([0, 2, 1, 3])
    return gl.convert_layout(gl.sum(products.reshape([R, 8, C * J // 8]), 2), eighths(num_warps))


@gluon.jit
def store_zeros(out, rows, TILES: gl.constexpr):
    """What a row of padding emits: zeros for TILES times the rows [R]."""
    R: gl.constexpr = rows.shape[0]
    for tile in range(TILES):
        gl.store(out + tile * R + rows, gl.zeros([R], out.dtype.element_ty, rows.type.layout))


@gluon.jit
def fetch(base, line, buffers, arrived, stage, wanted=True):
    """Start copying the tile that begins at a line of the base into the buffer of a stage, where wanted."""
    mbarrier.expect(arrived.index(stage), base.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(base, [line, 0], arrived.index(stage), buffers.index(stage), pred=wanted)


@gluon.jit
def fetch_first(base, line, STAGES: gl.constexpr):
    """Start copying a tile for each stage. Returns the buffers, and barriers that say what has arrived."""
    LINES: gl.constexpr = base.block_shape[0]
    buffers = gl.allocate_shared_memory(base.dtype, [STAGES, LINES, base.block_shape[1]], base.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), 1)
    # The copy engine must find the barriers initialised, and another thread may start the copies.
    fence_async_shared()
    gl.barrier()
    for stage in gl.static_range(STAGES):
        fetch(base, line + stage * LINES, buffers, arrived, stage)
    return buffers, arrived


@gluon.jit
def read_tile(buffers, arrived, tile, ROWS: gl.constexpr, num_warps: gl.constexpr):
    """Wait for a tile and read it as [R, C, J] in fp32."""
    STAGES: gl.constexpr = buffers.shape[0]
    J: gl.constexpr = buffers.shape[2]
    C: gl.constexpr = buffers.shape[1] // ROWS
    mbarrier.wait(arrived.index(tile % STAGES), (tile // STAGES) & 1)
    state = buffers.index(tile % STAGES).load(lines(C, J, num_warps)).reshape([ROWS, C, J])
    return gl.convert_layout(state, cube(J, num_warps)).to(gl.float32)


@gluon.jit
def fetch_after_read(base, first_line, buffers, arrived, tile, TILES: gl.constexpr):
    """Reuse the buffer of a tile that has been read."""
    STAGES: gl.constexpr = buffers.shape[0]
    if STAGES < TILES:
        line = first_line + (tile + STAGES) * base.block_shape[0]
        fetch(base, line, buffers, arrived, tile % STAGES, tile + STAGES < TILES)


@gluon.jit
def fetch_after_write(base, first_line, buffers, arrived, tile, TILES: gl.constexpr):
    """Reuse the buffer of the tile before this one, once it has been copied back from there."""
    STAGES: gl.constexpr = buffers.shape[0]
    if STAGES < TILES:
        tma.store_wait(0)
        after = tile - 1 + STAGES
        line = first_line + after * base.block_shape[0]
        fetch(base, line, buffers, arrived, after % STAGES, (tile > 0) & (after < TILES))


@gluon.jit
def write_tile(base, first_line, buffers, tile, state, num_warps: gl.constexpr):
    """Start copying a tile [R, C, J] back. tma.store_wait(0) before the program ends."""
    LINES: gl.constexpr = base.block_shape[0]
    C: gl.constexpr = state.shape[1]
    J: gl.constexpr = state.shape[2]
    buffer = buffers.index(tile % buffers.shape[0])
    merged = state.to(base.dtype).reshape([LINES, J])
    buffer.store(gl.convert_layout(merged, lines(C, J, num_warps)))
    fence_async_shared()
    tma.async_copy_shared_to_global(base, [first_line + tile * LINES, 0], buffer)
