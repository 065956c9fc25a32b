"""What every estimator, loss and correction declares. No module of this folder imports torch or numpy: the configuration reads them."""
