"""GGUF files of llama.cpp, the third wing: metadata and tensors of one file.

:mod:`convert.gguf.file` reads the file, :mod:`convert.gguf.formats` its numbers, and
:mod:`convert.gguf.target` translates names and settings into those of a checkpoint. From there on a
target of a GGUF file is one of a checkpoint.
"""
