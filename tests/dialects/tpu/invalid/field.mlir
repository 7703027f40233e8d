// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s

// CHECK: tpu.halt has no field
tpu.program @p {
  tpu.halt #tpu.f<n0 = 3>
}
