//! Kernels: compiled once for each source and set of defines, looked up at each launch.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CString, c_void};

use cudarc::driver::{result, sys};
use ops::kernel::{Card, Launch, List, PRELUDE, Source};

use crate::cubins::{Cubins, hash};
use crate::gpu::{Stream, explain};
use crate::nvrtc::{Nvrtc, options};

/// All that a machine-code module depends on, for one card and compiler.
type ModuleKey = (Source, List<(&'static str, i64), 24>);

/// The compiler and what it made.
#[derive(Debug)]
pub(crate) struct Kernels {
    nvrtc: Nvrtc,
    cubins: Cubins,
    modules: HashMap<ModuleKey, Module>,
    /// Compiled, not taken from disk.
    pub(crate) compiled: usize,
}

#[derive(Debug)]
struct Module {
    handle: sys::CUmodule,
    functions: Vec<(&'static str, sys::CUfunction)>,
}

// SAFETY: handles; the driver locks.
unsafe impl Send for Module {}

impl Module {
    fn load(cubin: &[u8]) -> Result<Module, String> {
        // SAFETY: a whole module, by the compiler or with its checksum.
        let handle = unsafe { result::module::load_data(cubin.as_ptr().cast()) };
        Ok(Module { handle: handle.map_err(explain)?, functions: Vec::new() })
    }
}

impl Kernels {
    pub(crate) fn new(nvrtc: Nvrtc, cubins: Cubins) -> Kernels {
        Kernels { nvrtc, cubins, modules: HashMap::new(), compiled: 0 }
    }

    /// Compiles what these launches need, on all cores.
    pub(crate) fn prepare(&mut self, card: &Card, launches: &[Launch]) -> Result<(), String> {
        let mut missing: Vec<ModuleKey> = Vec::new();
        for launch in launches {
            let key = (launch.source, launch.defines);
            if !self.modules.contains_key(&key) && !missing.contains(&key) {
                missing.push(key);
            }
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = missing.len().div_ceil(threads).max(1);
        let (nvrtc, cubins) = (&self.nvrtc, &self.cubins);
        let compile = |key: &ModuleKey| machine_code(nvrtc, cubins, card, &key.0, key.1.as_slice());
        let binaries: Vec<_> = std::thread::scope(|scope| {
            let workers: Vec<_> = missing
                .chunks(share)
                .map(|keys| scope.spawn(move || keys.iter().map(compile).collect::<Vec<_>>()))
                .collect();
            workers.into_iter().flat_map(|w| w.join().unwrap_or_default()).collect()
        });
        for (key, binary) in missing.into_iter().zip(binaries) {
            let (cubin, fresh) = binary?;
            self.compiled += usize::from(fresh);
            self.modules.insert(key, Module::load(&cubin)?);
        }
        for launch in launches {
            self.get(card, launch)?;
        }
        Ok(())
    }

    /// The kernel of a launch.
    pub(crate) fn get(&mut self, card: &Card, launch: &Launch) -> Result<Function, String> {
        let module = match self.modules.entry((launch.source, launch.defines)) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let defines = launch.defines.as_slice();
                let (cubin, fresh) =
                    machine_code(&self.nvrtc, &self.cubins, card, &launch.source, defines)?;
                self.compiled += usize::from(fresh);
                entry.insert(Module::load(&cubin)?)
            }
        };
        if let Some((_, function)) = module.functions.iter().find(|(e, _)| *e == launch.entry) {
            return Ok(Function(*function));
        }
        let function = function(module.handle, launch.entry, card)
            .map_err(|why| format!("kernel `{}` of {}: {why}", launch.entry, launch.source.name))?;
        module.functions.push((launch.entry, function));
        Ok(Function(function))
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        for module in self.modules.values() {
            // SAFETY: loaded above; the context outlives it.
            let _ = unsafe { result::module::unload(module.handle) };
        }
    }
}

/// From disk or from the compiler, and whether the latter.
fn machine_code(
    nvrtc: &Nvrtc,
    cubins: &Cubins,
    card: &Card,
    source: &Source,
    defines: &[(&str, i64)],
) -> Result<(Vec<u8>, bool), String> {
    let key = key(nvrtc.version(), card, source, defines);
    if let Some(cubin) = cubins.get(key) {
        return Ok((cubin, false));
    }
    let text =
        format!("#line 1 \"prelude.cuh\"\n{PRELUDE}\n#line 1 \"{}\"\n{}", source.name, source.text);
    let cubin = nvrtc
        .compile(source.name, &text, defines, card.arch)
        .map_err(|why| format!("{} with {defines:?}: {why}", source.name))?;
    cubins.put(key, &cubin);
    Ok((cubin, true))
}

fn key(version: (i32, i32), card: &Card, source: &Source, defines: &[(&str, i64)]) -> u128 {
    let options = options(defines, card.arch).join("\0");
    let version = format!("nvrtc {}.{}", version.0, version.1);
    let parts = [version.as_str(), &options, PRELUDE, source.name, source.text];
    hash(&parts.map(str::as_bytes))
}

fn function(module: sys::CUmodule, entry: &str, card: &Card) -> Result<sys::CUfunction, String> {
    use sys::CUfunction_attribute as A;
    let name = CString::new(entry).map_err(|e| e.to_string())?;
    // SAFETY: a loaded module; its functions live as long.
    unsafe {
        let function = result::module::get_function(module, name).map_err(explain)?;
        let of = |what| result::function::get_function_attribute(function, what).map_err(explain);
        let fixed = of(A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?;
        let dynamic = A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let set = |what, value| {
            result::function::set_function_attribute(function, what, value).map_err(explain)
        };
        set(dynamic, card.shared as i32 - fixed)?;
        if card.arch >= 90 {
            set(A::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
        }
        Ok(function)
    }
}

/// A pointer to each argument, whose bits lie in its low bytes.
pub(crate) fn pointers(args: &mut [u64]) -> [*mut c_void; 32] {
    let mut pointers = [std::ptr::null_mut(); 32];
    for (pointer, arg) in pointers.iter_mut().zip(args) {
        *pointer = std::ptr::from_mut(arg).cast();
    }
    pointers
}

/// A kernel that can be launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(sys::CUfunction);

impl Function {
    /// Puts a launch on a stream. `args` points to each argument.
    ///
    /// # Safety
    /// The arguments are those that the kernel takes, and the addresses are valid for what it does.
    pub(crate) unsafe fn launch(
        self,
        card: &Card,
        launch: &Launch,
        args: &mut [*mut c_void],
        stream: &Stream,
    ) -> Result<(), String> {
        // SAFETY: plain data of which the driver reads what the ids name.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        if card.arch >= 90 {
            use sys::CUlaunchAttributeID as Id;
            attributes[0].id = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[0].value.programmaticStreamSerializationAllowed = 1;
            count = 1;
            if launch.cluster > 1 {
                attributes[1].id = Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
                attributes[1].value.clusterDim.x = launch.cluster;
                attributes[1].value.clusterDim.y = 1;
                attributes[1].value.clusterDim.z = 1;
                count = 2;
            }
        } else if launch.cluster > 1 {
            return Err(format!("clusters of {} on sm_{}", launch.cluster, card.arch));
        }
        let config = sys::CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared,
            hStream: stream.0,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count,
        };
        // SAFETY: by contract; `config` and the pointers live through the call, which copies them.
        let status = unsafe {
            sys::cuLaunchKernelEx(&config, self.0, args.as_mut_ptr(), std::ptr::null_mut())
        };
        status.result().map_err(explain)
    }
}
