"""The bytes of a compiled program against those that its arrays have."""

import jax
import jax.numpy as jnp

from bench.gpu_compiler import bytes_moved

_PROGRAM = """
HloModule step, is_scheduled=true

%scaled (p.0: f32[4,256], p.1: s32[]) -> f32[256] {
  %p.0 = f32[4,256]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %taken = f32[1,256]{1,0} dynamic-slice(%p.0, %p.1, %zero), dynamic_slice_sizes={1,256}
  ROOT %row = f32[256]{0} bitcast(%taken)
}

%stored (q.0: bf16[4,256], q.1: f32[256], q.2: s32[]) -> bf16[4,256] {
  %q.0 = bf16[4,256]{1,0} parameter(0)
  %q.1 = f32[256]{0} parameter(1)
  %q.2 = s32[] parameter(2)
  %rounded = bf16[256]{0} convert(%q.1)
  %row = bf16[1,256]{1,0} bitcast(%rounded)
  %zero = s32[] constant(0)
  ROOT %put = bf16[4,256]{1,0} dynamic-update-slice(%q.0, %row, %q.2, %zero)
}

%body (state: (s32[], f32[4,256], bf16[4,256])) -> (s32[], f32[4,256], bf16[4,256]) {
  %state = (s32[], f32[4,256]{1,0}, bf16[4,256]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %rows = f32[4,256]{1,0} get-tuple-element(%state), index=1
  %out = bf16[4,256]{1,0} get-tuple-element(%state), index=2
  %row = f32[256]{0} fusion(%rows, %i), kind=kLoop, calls=%scaled
  %kept = bf16[4,256]{1,0} fusion(%out, %row, %i), kind=kLoop, calls=%stored
  ROOT %next = (s32[], f32[4,256]{1,0}, bf16[4,256]{1,0}) tuple(%i, %rows, %kept)
}

ENTRY %main (x: f32[4,256], y: bf16[4,256]) -> bf16[4,256] {
  %x = f32[4,256]{1,0} parameter(0)
  %y = bf16[4,256]{1,0} parameter(1)
  %start = s32[] constant(0)
  %init = (s32[], f32[4,256]{1,0}, bf16[4,256]{1,0}) tuple(%start, %x, %y)
  %loop = (s32[], f32[4,256]{1,0}, bf16[4,256]{1,0}) while(%init), condition=%c, \
body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %done = bf16[4,256]{1,0} get-tuple-element(%loop), index=2
  ROOT %copy = bf16[4,256]{1,0} copy(%done)
}
"""


def test_of_a_slice_and_of_an_update_in_place_the_row_counts_as_often_as_it_is_moved():
    # A fusion reads a row and the counter, and writes the row; the other one reads it
    # and the counter, and writes half of the bytes.
    row = (1024 + 4 + 1024) + (1024 + 4 + 512)
    assert bytes_moved(_PROGRAM) == 4 * row + 2 * 4 * 256 * 2


def test_a_program_reads_its_inputs_and_writes_its_result():
    def outer(x, y):
        return jnp.exp(x) @ y

    shape = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    compiled = jax.jit(outer).lower(shape, shape).compile()
    # The exponentials are written and read, too.
    assert bytes_moved(compiled.as_text()) == 5 * 512 * 512 * 4
