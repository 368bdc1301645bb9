"""What is minimised: functionals of Q, their normal form, the problem, and what is known of it."""
