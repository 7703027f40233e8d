"""Rules that turn ops of the `onnx` dialect into `top`, one module for each family of operators."""
