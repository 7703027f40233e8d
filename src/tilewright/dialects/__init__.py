"""The dialects of our own: onnx, top, quant, tpu."""
