"""Literal definitions, evaluated in float64 with loops: slow, obvious, and written from the equations alone.

Every function takes ``dtype`` (default float64): the arithmetic to evaluate the definition in, so that the error budget
of a float32 kernel can be derived from what the plain definition loses in float32.
"""
