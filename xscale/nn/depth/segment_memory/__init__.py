"""Memory of earlier segments that the blocks of a stack read, and its compression"""
