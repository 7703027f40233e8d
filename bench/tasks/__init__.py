"""What the accuracy bench measures models on: inputs, labels, figures; and other tools beside."""
