"""The checks of IFEval (arXiv 2311.07911), strict variant: each checks whether a text follows a verifiable
instruction.
"""
