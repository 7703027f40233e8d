// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s

// CHECK: must end with its only
tpu.program @p {
  tpu.halt
  tpu.halt
}
