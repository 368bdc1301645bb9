"""How sums over pairs and integrals are made: exactly, at random, round a ring of devices, by quadrature."""
