"""The declarations of estimators, losses and corrections: their configuration keys and traits.

The configuration imports these modules, so none of them imports torch or numpy.
"""
