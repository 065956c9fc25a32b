"""The declarations of estimators, losses and corrections: their keys and traits.

No module of this folder imports torch or numpy, because the configuration reads them.
"""
