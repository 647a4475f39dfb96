"""Video files and the training clips that are cut from them."""
