// One pointwise program over many ranges of one buffer. `rows` has FIELDS numbers a range: its elements, the period of
// operands that repeat, and the byte where each operand begins; `map` has two a work group: its range, and which CHUNK
// of it. POINTERS declares the operands of the group's range, VECTOR and SCALAR do W elements or one at `i`.

__kernel __attribute__((reqd_work_group_size(LOCAL, 1, 1)))
void batch(__global uchar *arena, __global const ulong *rows, __global const uint *map)
{
    __global const ulong *row = rows + (size_t)map[2 * get_group_id(0)] * FIELDS;
    const NUMBER count = (NUMBER)row[0], period = (NUMBER)row[1];
    const NUMBER begin = (NUMBER)map[2 * get_group_id(0) + 1] * CHUNK;
    const NUMBER end = count - begin < CHUNK ? count : begin + CHUNK;
    POINTERS
    NUMBER i = begin + (NUMBER)get_local_id(0) * W;
    for (; i + W <= end; i += LOCAL * W) { VECTOR }
    // What is left of a vector at the range's end is one item's: the others are beyond it.
    for (; i < end; ++i) { SCALAR }
}
