// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s

// CHECK: a field is given twice
tpu.program @p {
  tpu.set_reg #tpu.f<rd = 1, rd = 2>
  tpu.halt
}
