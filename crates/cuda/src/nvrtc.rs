//! The run-time compiler: from CUDA C++ to machine code for one architecture.
//!
//! Always machine code (CUBIN), never PTX: a driver refuses PTX from a newer compiler, but loads
//! machine code of any 13.x.

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr::null;

use libloading::Library;

type Program = *mut std::ffi::c_void;
type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> c_int;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;

/// A loaded compiler.
#[derive(Debug)]
pub struct Nvrtc {
    path: PathBuf,
    version: (i32, i32),
    create: Create,
    compile: Compile,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    cubin_size: Size,
    cubin: Text,
    log_size: Size,
    log: Text,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    /// Keeps the functions valid.
    _libraries: Vec<Library>,
}

/// Where toolkits put their libraries.
const USUAL: [&str; 4] = [
    "/usr/local/cuda/lib64",
    "/usr/local/cuda-13/lib64",
    "/opt/cuda/lib64",
    "/usr/lib/x86_64-linux-gnu",
];
const NAMES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc.so"];
const BUILTINS: &str = "libnvrtc-builtins.so.13.";

impl Nvrtc {
    /// The first NVRTC 13 in these folders, in the usual ones, or on the loader's path.
    ///
    /// # Errors
    /// None found: a line that says where it was looked for.
    pub fn find(folders: &[PathBuf]) -> Result<Nvrtc, String> {
        let usual = USUAL.iter().map(PathBuf::from);
        let mut why = None;
        for folder in folders.iter().cloned().chain(usual) {
            for name in NAMES {
                let path = folder.join(name);
                if path.exists() {
                    match Nvrtc::load(&path) {
                        Ok(found) => return Ok(found),
                        Err(error) => why = Some(error),
                    }
                }
            }
        }
        Nvrtc::load(Path::new(NAMES[0])).map_err(|_| {
            why.unwrap_or_else(|| {
                let named: Vec<_> = folders.iter().map(|f| f.display().to_string()).collect();
                format!(
                    "no CUDA compiler found (libnvrtc.so.13 of CUDA 13; looked in {}{}{} and on the \
                     library path; `pip install nvidia-cuda-nvrtc` brings one)",
                    named.join(", "),
                    if named.is_empty() { "" } else { ", " },
                    USUAL.join(", ")
                )
            })
        })
    }

    fn load(path: &Path) -> Result<Nvrtc, String> {
        let at = |e: libloading::Error| format!("{}: {e}", path.display());
        let mut libraries = Vec::new();
        // NVRTC opens its builtins by name only: have them in the process before it asks.
        let beside = path.parent().and_then(|folder| std::fs::read_dir(folder).ok());
        for entry in beside.into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(BUILTINS) {
                // SAFETY: NVIDIA's library; its initialisers have no preconditions.
                libraries.extend(unsafe { Library::new(entry.path()) }.ok());
            }
        }
        // SAFETY: as above.
        let library = unsafe { Library::new(path) }.map_err(at)?;
        // SAFETY: the signatures are those of nvrtc.h, CUDA 13.
        unsafe {
            let version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int =
                *library.get(b"nvrtcVersion\0").map_err(at)?;
            let (mut major, mut minor) = (0, 0);
            version(&mut major, &mut minor);
            if major != 13 {
                return Err(format!("{}: NVRTC {major}.{minor}, not 13", path.display()));
            }
            let nvrtc = Nvrtc {
                path: path.to_owned(),
                version: (major, minor),
                create: *library.get(b"nvrtcCreateProgram\0").map_err(at)?,
                compile: *library.get(b"nvrtcCompileProgram\0").map_err(at)?,
                destroy: *library.get(b"nvrtcDestroyProgram\0").map_err(at)?,
                cubin_size: *library.get(b"nvrtcGetCUBINSize\0").map_err(at)?,
                cubin: *library.get(b"nvrtcGetCUBIN\0").map_err(at)?,
                log_size: *library.get(b"nvrtcGetProgramLogSize\0").map_err(at)?,
                log: *library.get(b"nvrtcGetProgramLog\0").map_err(at)?,
                error: *library.get(b"nvrtcGetErrorString\0").map_err(at)?,
                _libraries: {
                    libraries.push(library);
                    libraries
                },
            };
            Ok(nvrtc)
        }
    }

    /// Where it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Major and minor.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles one translation unit for `arch` (90 for 9.0) to machine code.
    ///
    /// # Errors
    /// The compiler's log.
    pub fn compile(
        &self,
        name: &str,
        text: &str,
        defines: &[(&str, i64)],
        arch: u32,
    ) -> Result<Vec<u8>, String> {
        let c = |s: String| CString::new(s).map_err(|_| format!("{name}: a zero byte"));
        let (text, name) = (c(text.to_owned())?, c(name.to_owned())?);
        let options = options(defines, arch).into_iter().map(c).collect::<Result<Vec<_>, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: strings outlive the program, which is destroyed below.
        unsafe {
            let made = (self.create)(&mut program, text.as_ptr(), name.as_ptr(), 0, null(), null());
            if made != 0 {
                return Err(self.words(made));
            }
            let count = options.len() as c_int;
            let compiled = (self.compile)(program, count, options.as_ptr());
            let outcome = if compiled == 0 {
                self.bytes(program, self.cubin_size, self.cubin)
            } else {
                let log = self.bytes(program, self.log_size, self.log).unwrap_or_default();
                let log = String::from_utf8_lossy(&log);
                Err(format!("{}: {}", self.words(compiled), log.trim_end_matches('\0').trim()))
            };
            (self.destroy)(&mut program);
            outcome
        }
    }

    /// # Safety
    /// A live program.
    unsafe fn bytes(&self, program: Program, size: Size, get: Text) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        // SAFETY: by contract; the buffer has the size that the compiler asked for.
        unsafe {
            let status = size(program, &mut bytes);
            let mut out = vec![0u8; bytes];
            let status = if status == 0 { get(program, out.as_mut_ptr().cast()) } else { status };
            if status == 0 { Ok(out) } else { Err(self.words(status)) }
        }
    }

    fn words(&self, status: c_int) -> String {
        // SAFETY: returns a static string for every number.
        let words = unsafe { CStr::from_ptr((self.error)(status)) };
        words.to_string_lossy().into_owned()
    }
}

/// The compiler's options. Part of what a cached binary depends on.
pub(crate) fn options(defines: &[(&str, i64)], arch: u32) -> Vec<String> {
    // From 9.0 on, some instructions exist only in code for exactly this architecture.
    let exact = if arch >= 90 { "a" } else { "" };
    let mut options = vec![
        format!("--gpu-architecture=sm_{arch}{exact}"),
        "--std=c++17".to_owned(),
        "-lineinfo".to_owned(),
    ];
    options.extend(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    options
}

#[cfg(test)]
mod tests {
    use super::options;

    #[test]
    fn architectures_and_defines() {
        let some = options(&[("ROWS", 8), ("SKEW", -1)], 90);
        assert_eq!(some[0], "--gpu-architecture=sm_90a");
        assert_eq!(some[some.len() - 2..], ["-DROWS=8", "-DSKEW=-1"]);
        assert_eq!(options(&[], 89)[0], "--gpu-architecture=sm_89");
    }
}
