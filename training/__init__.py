"""How the checkpoint that ships with glm5fn was made.

Run ``python -m training.train --help`` from the repository's root.
"""
