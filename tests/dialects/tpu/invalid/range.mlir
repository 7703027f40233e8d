// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s

// CHECK: n0 must be 1..16384, not 0
tpu.program @p {
  tpu.vec_pool #tpu.f<n0 = 0>
  tpu.halt
}
