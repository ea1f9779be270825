"""How each kernel takes the place of a chain; importing the package registers all patterns."""

from autopar.codegen.fusion.patterns import activation, dropout, loss, norm, rotary, softmax

__all__ = ["activation", "dropout", "loss", "norm", "rotary", "softmax"]
