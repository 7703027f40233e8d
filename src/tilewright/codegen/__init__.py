"""From instructions to files: assembler, images, programs and packages."""
