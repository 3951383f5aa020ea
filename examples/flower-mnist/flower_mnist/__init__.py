"""MNIST digits under local differential privacy, on Flower."""
