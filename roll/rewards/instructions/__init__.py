"""The checks of IFEval (arXiv 2311.07911): does a text keep to an instruction that can be verified? Its strict reading."""
