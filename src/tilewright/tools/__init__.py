"""The documents' command-line tools: `tpu-mlir-opt`, `tpu-mlir-translate`, `tpu-mlir-runner`."""
