from baracuda.jax._bind import call, register
register()
