// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s

// CHECK: op must be one of add, sub, mul, max, min, not div
tpu.program @p {
  tpu.vec_eltwise #tpu.f<op = div>
  tpu.halt
}
