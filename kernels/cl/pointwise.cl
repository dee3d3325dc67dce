// A pointwise program over one domain. The preamble holds the program as functions over vectors and scalars (expr_W),
// the statements that load, compute and store at given coordinates, and WALK: the grid's variables and the loops.

__kernel __attribute__((reqd_work_group_size(LOCAL, 1, 1)))
void pointwise(PARAMS)
{
    WALK
}
