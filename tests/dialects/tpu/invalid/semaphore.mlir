// RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s

// CHECK: wait must list different semaphores 0..31
tpu.program @p {
  tpu.fence #tpu.f<wait = [32]>
  tpu.halt
}
