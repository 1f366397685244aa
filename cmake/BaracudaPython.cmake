# Where the building Python has a package, without importing it: a list of directories, empty when
# there is no such package or no Python.
function(baracuda_python_package_dirs package out)
  set(dirs "")
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND
        "${Python_EXECUTABLE}" -c
        "import importlib.util, sys; s = importlib.util.find_spec(sys.argv[1]); print(*(s.submodule_search_locations or [] if s else []), sep=';', end='')"
        ${package}
      OUTPUT_VARIABLE dirs
      COMMAND_ERROR_IS_FATAL ANY
    )
  endif()
  set(${out} "${dirs}" PARENT_SCOPE)
endfunction()
