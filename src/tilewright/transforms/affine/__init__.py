"""From whole tensors to loops over tiles in SRAM."""
