"""Rules of matrix products, linear algebra and Fourier transforms."""
