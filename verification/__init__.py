"""Long statistical runs, and the law checks that the tests share with them."""
