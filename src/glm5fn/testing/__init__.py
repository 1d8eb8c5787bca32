"""What proves a kernel: literal float64 definitions, input makers, error budgets and poisoned memory.

It is shipped so that a kernel or a chip can be brought up against it: ``glm5fn.testing.oracle`` and
``glm5fn.testing.inputs`` have one module per file of ``glm5fn.ops``; ``compare`` and ``poison`` hold the checks.
"""
