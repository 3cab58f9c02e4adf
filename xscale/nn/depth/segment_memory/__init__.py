"""Memory of earlier segments that the blocks of a stack read, one kind a file"""
