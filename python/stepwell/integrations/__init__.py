"""stepwell inside the checkpoint calls of other libraries, one module for each. Each module imports
its library; nothing here is imported by ``import stepwell``."""
