"""Post-training quantisation: how ranges, codes, biases and precision are chosen.

What the integers mean is `tilewright.quant`; how they become a module is `transforms/quant`. This
package decides between the possibilities, by running the float and the integer network.
"""
